"""Measurements. `python -m benchmarks.NAME --help` has the options of each.

Speed on a GPU, next to other libraries:

    scan_kernels             one op, forward and backward (peers: scan_peers)
    decode                   one op, one token
    model_step               a training step of a whole model (peers: model_peers)
    mixers                   the same for every mixer, in one model
    sparse_state             sparse state expansion against partitions and tokens
    generation               text, against length and batch
    train_step               a training step of a config, with a profile
    scaling                  1, 2, 4, ... devices
    copies                   several runs as one program

Without a GPU, by XLA's compiler for a described one (`described`):

    passes                   the passes over memory of a training step

On a CPU: `scans` (time, memory), `numerics` and `limits` (errors), `load_pretrained`.
Quality: `conversion`; of trained models: `experiments`.

`csv_rows`, `timing`, `turns` and the peers are parts of these; `plot_kernels` draws a table.
"""
