"""ONNX models as graphs: nodes become operators of hidet, and initializers become weights that stay in their files."""
