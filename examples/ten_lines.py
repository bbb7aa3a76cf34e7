import torch

import cudnngraph as cg

device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {"x": (8, 64, 56, 56), "weight": (64, 64, 3, 3), "bias": (64,)}
tensors = {name: torch.randn(size, device=device) for name, size in sizes.items()}

g = cg.Graph("conv_bias_relu")
x, weight, bias = (g.input(name, like=tensor) for name, tensor in tensors.items())
g.output("y", g.relu(g.bias(g.conv(x, weight, padding=1), bias)))

exe = g.compile(device)  # cuDNN plans on a GPU, the reference executor on a CPU
print(exe(**tensors).shape, exe.explain(), sep="\n")
