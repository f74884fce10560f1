"""Behind Triton: the model repository, its launch, what its models do, and a client."""
