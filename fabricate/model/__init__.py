"""The model before it trains: building on the meta device, pretrained weights, compiling, memory, and its export afterwards."""
