"""The calls that users make with tensors; users import them from :mod:`reshard`.

A call passes through the packages in this order: ``arguments`` reads and checks what it was given, ``preparation``
agrees with the other ranks on it and on a plan, and ``transfers`` moves the data. ``arrays`` is below all of them.
``lossless`` is above them: it has these steps for codecs without loss. The modules here put the steps together.

May import every package except :mod:`reshard.testing` and the front ends.
"""
