/* SPDX-License-Identifier: MIT */
/*
 * Calls of UVM on a descriptor of /dev/nvidia-uvm that is an address space: plain numbers, layouts as in
 * mpsd/gpu/nvidia/uvm_abi.py. None of the driver's libraries is called.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MPSD_UVM_REGISTER_SPACE 25ul	/* a GPU's part of an address space; the GPU's UUID is the first of what is given */
#define MPSD_UVM_UNREGISTER_SPACE 26ul
#define MPSD_UVM_MAP_EXTERNAL 33ul	/* memory of the resource manager's is mapped for a GPU */

/* An external range of its own, in which nothing is mapped. False: something lies there, or it cannot be. */
bool mpsd_uvm_external(int fd, uint64_t base, size_t size);

/* What reads there finds zeroes, and what writes leaves nothing; in an external range. */
bool mpsd_uvm_map_sparse(int fd, uint64_t base, size_t size, const uint8_t gpu[16]);

/*
 * An external range with these very bounds, and all that is mapped in it. UVM waits until no GPU has a translation of it
 * any more; then it may wait for the resource manager, to let go of the memory, for as long as that is busy.
 */
bool mpsd_uvm_free(int fd, uint64_t base, size_t size);

/* The GPU's part of the address space ends: all that is mapped for it there, and what UVM holds of its channels. */
bool mpsd_uvm_unregister_space(int fd, const uint8_t gpu[16]);

/* Pages of a managed range come from the host. */
void mpsd_uvm_prefer_host(int fd, uint64_t base, size_t size);
