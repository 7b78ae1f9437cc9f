"""Pipeline stages in training.

`instructions`  what a stage does in a step, in order: a schedule of the plan with the messages between its passes
`messages`      hidden states and gradients on their way between stages
`stage_module`  the layers of this rank, as the `PipelineModule` that DeepSpeed expects
"""
