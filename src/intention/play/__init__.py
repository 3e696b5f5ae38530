"""`intention play`: KVQ space in the browser, computed live by this library. Needs the extra `intention[play]`.

fields      what a scene's state is made of, checked; the same table makes the page's controls and its links
scenes      what each scene computes, the lines of Python that compute it, and its picture for `--export`
models      small trained models that come with the package
server      the page and its questions: limits, headers, one thread for torch
command     `intention play`
"""

__all__: list[str] = []
