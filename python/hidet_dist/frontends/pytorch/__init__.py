"""Conversion of PyTorch modules to graphs: exported to ATen operators, which are lowered to hidet's."""
