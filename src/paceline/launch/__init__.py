"""Find this process's place in a run, and start runs on this machine.

place        which rank of how many, read from the environment (pure)
store        the key-value store through which the ranks meet
device       which device a rank computes on, and which backend serves it
world        world(): place, store, device and process group in one object

job          what `paceline run` starts: command line and environment of every rank (pure)
run          start ranks, watch them, stop them together
process      one rank, seen from the launcher
output       many ranks' lines on one terminal
report       the words at the end of a run that failed
store_host   the process that holds the store of a run
bootstrap    the first thing a rank of `paceline run --drop-in` runs
"""
