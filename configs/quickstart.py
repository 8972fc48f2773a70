"""The whole path in about two minutes of training: text, tokens, training, curve, sample, checkpoint.

Teaches   what a run is: a falling curve, a validation loss beside it, and a text that looks more and more like its source.
Needs     any CPU. On 2 cores about two minutes of training; a fixed number of updates, not of seconds.
Data      `stdlib`, the source text of your own Python's standard library (11 MB), as bytes. Prepared on the first start.
Start     python train.py
Watch     the loss falls from ln 257 = 5.5 nats a byte to under 1.3 in 900 updates; out/quickstart/loss.png draws it.
Reaches   a validation loss of about 0.97 nats a byte on the first 131,072 bytes, 1.08 on the whole validation split, after 116 s
          of training on 2 cores of an AMD EPYC (Python 3.11's source). Then: python sample.py --start="class "
"""

dataset = "stdlib"

# a small model with what models have learned since GPT-2; 0.9M parameters
n_layer, n_head, n_embd = 4, 4, 128
block_size = 256  # bytes of context
norm, pos, mlp = "rmsnorm", "rope", "swiglu"
qk_norm = True

batch_size = 8
total_batch_size = 2048  # one micro-batch: few tokens an update, many updates

# Muon learns more from each update: with AdamW (learning_rate=4e-3) 400 updates end at 1.53 nats, with Muon at 1.14
optimizer = "muon"
muon_learning_rate = 0.02
learning_rate = 1e-2  # of AdamW, on embeddings and norms
min_lr = 0.0
lr_schedule = "linear"
warmup_iters = 20
max_iters = 880

eval_interval = 220
eval_tokens = 131_072
log_interval = 20
sample_tokens = 400
