"""Several hosts on one Linux machine: namespaces joined by shaped links."""
