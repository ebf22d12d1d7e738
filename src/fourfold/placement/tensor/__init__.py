"""Tensor grids: linears, norms, embeddings and losses whose features are cut over the axes x and y.

Every algorithm is one file `grid_<name>.py`: its options, and the `Grid` that they ask of the mesh.
"""
