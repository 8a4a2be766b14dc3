"""Operations in plain torch: the definition that all other kernels are compared with."""
