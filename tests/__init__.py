"""Tests by what they need: cpu (torch), deviceless (the cuDNN library), gpu (an NVIDIA GPU)."""
