"""Parameters of recurrent blocks that stay fp32 when training in 16 bits."""
