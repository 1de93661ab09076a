"""Methods of adaptation, one file each; ``jaxllm.peft.method_table`` has their rows."""
