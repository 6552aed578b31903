"""PyTorch modules as graphs: exported to ATen operators, which become hidet's."""
