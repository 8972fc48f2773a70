"""GPT-2 124M on one GPU: a full reproduction.

Teaches   what a real pre-training run is made of: tokens a step, warmup and decay, evaluation on fixed tokens.
Needs     one GPU with 24 GB or more (bfloat16), 22 GB of disk for the tokens, 1.5 GB for each checkpoint.
Data      python prepare.py fineweb10B     (ready-made GPT-2 tokens from the hub)
Start     python train.py configs/gpt2_124m.py
Watch     validation loss at step 250 (about 5 falling towards 4), then slowly down; MFU in the line.
Reaches   a validation loss of about 3.28 on FineWeb after 10B tokens, which is what llm.c's run of this model reached
          (its discussion 481); not measured here yet.
"""

dataset = "fineweb10B"

# GPT-2 as OpenAI built it
n_layer, n_head, n_embd = 12, 12, 768
block_size = 1024
bias = True
mlp = "gelu_tanh"

# 0.5M tokens an update, as GPT-3's paper gives for this size; micro-batches are summed up to it
batch_size = 16
total_batch_size = 524_288

learning_rate = 6e-4
min_lr = 0.0
lr_schedule = "cosine"
warmup_iters = 700
max_iters = 18_865  # one pass over 10B tokens
weight_decay = 0.1

eval_interval = 250
eval_tokens = 10_485_760
save_interval = 1000
log_interval = 10
