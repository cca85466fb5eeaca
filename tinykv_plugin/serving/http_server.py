"""PagedHTTPServer: a thread per connection, for many clients at once."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class PagedHTTPServer(ThreadingHTTPServer):
    """mlx-lm's kind of server, which lets a crowd connect at once and doesn't report clients that hang up."""

    # The default of 5 makes clients that come at the same moment wait for a second or three.
    request_queue_size = 512
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what went wrong with a connection, unless its client just left."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
