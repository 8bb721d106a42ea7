"""How an actor answers many steps: by torch, or as a graph that ONNX Runtime runs."""
