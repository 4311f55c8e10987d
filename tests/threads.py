"""Functions that run at the same time."""

import threading


def in_threads(*functions):
    """Run functions concurrently in threads; return their results or errors."""
    found = [None] * len(functions)

    def run(i):
        try:
            found[i] = functions[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
    return found
