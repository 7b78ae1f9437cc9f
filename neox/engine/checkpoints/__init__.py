"""Saving and loading of a training, and the decision with which checkpoint it begins.

`run_start`         which checkpoint a run begins with, and which parts of it; rank 0 decides
`loading`           from that decision to an engine with its weights, optimizer state and position
`saving`            one save, from the refusal by a feature to the new `latest`
`background_saves`  the same with copies in CPU memory, which a thread writes (`async_save`)
`run_files`         what each checkpoint says of its run besides weights and states
"""
