"""The one way from a sandbox to other machines: a forward proxy that decides per connection."""
