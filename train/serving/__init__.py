"""An HTTP server for one model: `lnssm-train serve`; it needs the extra `serve`.

engine     the thread that owns the slots of a batch; queue, cancellation, metrics
requests   bodies of the OpenAI API as checked values
app        routes and answers
command    the process
"""
