"""Lets Triton 3.6's interpreter run under NumPy 2.4, which no longer turns a one-element array into an int."""


def repair():
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
