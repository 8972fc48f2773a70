"""SFT on any CPU: the quickstart's model learns to answer, and what that costs it is measured.

Teaches   SFT is another kind of data in the same loop: the loss is on the answers alone, general text is watched beside it (forgetting),
          and some of it is mixed in against that (replay).
Needs     a CPU and a minute or two, and the base model that the quickstart trains (python train.py, two minutes).
Data      made up on the spot: all sums of two numbers below 100, 5% of them never trained on; and the quickstart's own text.
Start     python train.py configs/sft_quickstart.py
Watch     the share of held-out answers that are right, 0% at the start; the loss on general text beside it. Then --replay_fraction=0:
          the answers come sooner and the text is lost.
Reaches   100% of 510 held-out answers right (0% before), in about 100 s of training on two CPU cores; the loss on general text rises from
          0.97 to 1.23 nats a byte (at update 300, before the sums are understood, it is 1.70).
          Ask it: python sample.py --out_dir=out/sft_quickstart --chat     (one question a chat: it has never seen a second)
"""

from configs.quickstart import *

task = "sft"
init_from = "out/quickstart"
init_optimizer = False

dataset = "arithmetic"
general_dataset = "stdlib"  # what the base was trained on: its loss there says what is forgotten
replay_dataset = "stdlib"
replay_fraction = 0.125  # of the samples; all of a text's tokens are learnt and 9% of the records', so it is most of the loss

muon_learning_rate = 0.015
max_iters = 900
eval_interval = 300
log_interval = 50
