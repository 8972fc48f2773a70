"""GPT-2 124M's layers with a block of today, trained by Muon: the loss of gpt2_124m in a sixth of its updates.

Teaches   what an optimizer and a block are worth. Muon moves the blocks' matrices along orthogonal directions and AdamW the rest, each at a
          rate of its own; the rate holds for 30% of the run and then falls in a line; rotary positions, RMSNorm on queries and keys too,
          squared ReLU, an untied head.
Needs     what gpt2_124m needs: one GPU with 24 GB or more; of the tokens only 1.7B are read.
Data      python prepare.py fineweb10B
Start     python train.py configs/gpt2_124m_muon.py, or under torchrun as gpt2_124m_ddp: ranks share Muon's work, a matrix each at a time
Watch     the validation loss: the public run had 4.59 after 125 updates, 4.10 after 250, 3.65 after 1,000, 3.45 after 2,000, and most of
          the rest came with the falling rate. Then the same block with --optimizer=adamw --learning_rate=1.5e-3 --warmup_iters=250
          --max_iters=5625, with which AdamW reached the same loss there.
Costs     6 hours on an RTX 4090, 8 minutes on 8 x H100 (--plan=1 --plan_gpu="RTX 4090", --plan=8; an MFU of 40% is assumed).
Reaches   not run by us on a GPU yet. The public run it follows reaches a validation loss of 3.28 in 3,250 updates of this batch, 3.2787 on
          average of ten (github.com/KellerJordan/modded-nanogpt, records/track_3_optimization, result 36; AdamW, result 2: 5,625). From there are
          shape, batch, schedule, Muon's rate and decay, AdamW's rate (that of the head) and beta1. It also has what this model has not: a norm
          on the embeddings (with a rate of 0.7 for them), logits capped at 15, heads that turn half of their channels, projections that
          start from zero, and twelve steps to an orthogonal matrix instead of five. So expect a little more than 3.28, or some hundred updates more.
"""

from configs.gpt2_124m import *

n_head = 6  # of 128 channels
norm, pos, mlp = "rmsnorm", "rope", "relu2"
qk_norm = True
rope_theta = 1024.0
tie_embeddings = False

optimizer = "muon"
muon_learning_rate = 0.025
learning_rate = 4e-3  # of AdamW, on embeddings, head, norms and biases
min_lr = 0.0
lr_schedule = "wsd"
decay_fraction = 0.7
warmup_iters = 0
max_iters = 3250  # 1.7B tokens
weight_decay = 0.05
beta1 = 0.8
grad_clip = 0.0  # an orthogonal step has one length whatever the gradient's

eval_interval = 125
