/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* What an image of code says of the memory that its kernels have besides what they are given. */
struct mpsd_symbols {
	void (*add)(void *to, const char *name, size_t length);	/* a variable in global memory; the name has no end */
	void *to;
	bool has_heap;		/* something in it calls the device's malloc() */
	bool is_unread;		/* some of it is packed in a way that cannot be read here */
};

/* Before the calls below: the loader may be another thread's, which waits for who makes those. */
void mpsd_symbols_start(void);

/* `image`: an ELF file, a fat binary or a text; of a fat binary what is for a GPU of `arch` (90 for compute capability 9.0). */
void mpsd_symbols_read(const void *image, size_t size, unsigned int arch, struct mpsd_symbols *found);
