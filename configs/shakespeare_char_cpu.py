"""nanoGPT's CPU example, faster: the same text and split, a model of the same size, its final loss in a fraction of the time.

Teaches   what a newer block (rotary positions, RMSNorm on queries and keys too, squared ReLU) and Muon bring where a run is short: nanoGPT's
          own settings take 2,000 updates to the loss that these reach in 250.
Needs     any CPU, seconds.
Data      python prepare.py shakespeare_char        (--file input.txt where there is no network)
Start     python train.py configs/shakespeare_char_cpu.py
Watch     the validation loss, beside that of shakespeare_char with nanoGPT's settings (its last lines say how).
Reaches   a validation loss of 1.862 on all of the validation split, where nanoGPT's 2,000 updates end at 1.892 by the same count, on two threads
          (1.880 by its own estimate over random batches; other threads round otherwise: 1.918 on one). `python -m tests.bench
          --peer PATH_TO_NANOGPT --text input.txt --only loss` measures both, and the time.
"""

from configs.shakespeare_char import *

# nanoGPT's README, "I only have a macbook": 0.8M parameters
n_layer, n_head, n_embd = 4, 4, 128
block_size = 64
dropout = 0.0  # a quarter of an epoch: nothing is seen twice
norm, pos, mlp = "rmsnorm", "rope", "relu2"
qk_norm = True

batch_size = 16
total_batch_size = 1024

optimizer = "muon"
muon_learning_rate = 0.02
learning_rate = 1e-2  # of AdamW, on embeddings and norms
min_lr = 0.0
lr_schedule = "linear"
warmup_iters = 20
max_iters = 250
lr_decay_iters = 250
beta2 = 0.95

eval_interval = 100
