"""nanoGPT's first example: a character-level GPT on all of Shakespeare's plays in 1 MB.

Teaches   training loss and validation loss part ways: the model can learn this text by heart.
Needs     a GPU for the settings below (minutes); on a CPU take the smaller ones of the last line.
Data      python prepare.py shakespeare_char        (--file input.txt where there is no network)
Start     python train.py configs/shakespeare_char.py
Watch     validation loss falls to its best, then rises; checkpoints/best keeps the best.
Reaches   a validation loss near 1.47, as nanoGPT's README reports of these settings on an A100; not measured here.
          On a CPU, with nanoGPT's smaller settings, 2,000 updates reach about 1.88:
          python train.py configs/shakespeare_char.py --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --batch_size=12 \\
              --total_batch_size=768 --dropout=0.0 --max_iters=2000 --lr_decay_iters=2000
"""

dataset = "shakespeare_char"

n_layer, n_head, n_embd = 6, 6, 384
block_size = 256  # characters of context
dropout = 0.2  # 1 MB of text and 10.7M parameters: it overfits

batch_size = 64
total_batch_size = 16_384  # one micro-batch

learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 100
max_iters = 5000
lr_decay_iters = 5000
beta2 = 0.99  # few tokens an update: a longer memory

eval_interval = 250
eval_tokens = 111_360  # nearly all of the validation text
log_interval = 10
