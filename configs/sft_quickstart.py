from configs.quickstart import *

task = "sft"
init_from = "out/quickstart"
init_optimizer = False
dataset = "arithmetic"
general_dataset = "stdlib"
replay_dataset = "stdlib"
replay_fraction = 0.25

max_iters = 600
eval_interval = 150
