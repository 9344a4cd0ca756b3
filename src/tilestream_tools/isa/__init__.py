"""What the compiler made of a kernel, without a GPU: its machine code read, and what it should cost.

``amdgcn`` parses, ``rates`` holds what is published of an instruction, ``model`` puts the two together; ``kernels`` is
the table of what can be compiled, ``build`` compiles, ``report`` says what came of it.
"""
