"""An HTTP server for one model: `lnssm-train serve`; it needs the extra `serve`.

command    the process of the device, and the start and end of both
engine     its thread, which owns the slots of a batch, and the messages of the two
front      the process of HTTP
link       its end of the connection: queue, cancellation, metrics
requests   bodies of the OpenAI API as checked values
app        routes and answers
"""
