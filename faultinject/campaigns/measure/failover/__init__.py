"""The measurements that fail-over rests on: driver instances, fences, signs of a fault."""
