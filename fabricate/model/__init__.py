"""The model before and after training: building on the meta device (`building`), pretrained weights (`pretrained`), torch.compile
(`compiling`), memory per rank (`memory`, `host_memory`), writing RUN_DIR/model/ (`export`).
"""
