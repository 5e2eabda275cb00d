/* SPDX-License-Identifier: MIT */
/* Memory that the program makes itself (cuMemCreate), for vmm.c, which has what it maps of it. With the lock of the windows. */
#pragma once

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "exact/exact.h"
#include "windows.h"

#define MPSD_VMM_BUCKETS 1024

static inline unsigned int mpsd_vmm_bucket(uint64_t key)
{
	return (unsigned int)((key * 0x9e3779b97f4a7c15ull) >> 54);
}

/* Of one cuMemCreate(). */
struct mpsd_block {
	struct mpsd_block *next;
	CUmemGenericAllocationHandle name, native;
	uint64_t moves;			/* before the copy of which `native` is */
	unsigned int natives, names;	/* references of that copy's, and the program's */
	unsigned int mappings;
	int fd;				/* of its memory; -1: there is none */
	bool is_anew;			/* each copy makes it, until it is mapped; a forked child has no `fd` of others either */
	size_t size;			/* 0: unknown */
	CUmemAllocationProp property;	/* as the program wanted it */
};

/* NULL: none that is followed. */
struct mpsd_block *mpsd_block_find(CUmemGenericAllocationHandle name);

/* What the copy in use calls it. */
CUresult mpsd_block_native(struct mpsd_block *block, CUmemGenericAllocationHandle *native);

/* Locked. The copy in use has answered that handle for something mapped outside; `handle` becomes what the program calls it. */
void mpsd_block_retained(CUmemGenericAllocationHandle *handle);

/* It may have a name or a mapping less. */
void mpsd_block_drop_if_unused(struct mpsd_block *block);

/* Takes the lock, in the copy in use. False: that was left meanwhile, and it is not taken. */
static inline bool mpsd_vmm_enter(void)
{
	pthread_mutex_lock(&mpsd_windows_lock);
	if (!mpsd_is_left())
		return true;
	pthread_mutex_unlock(&mpsd_windows_lock);
	return false;
}

static inline CUresult mpsd_vmm_leave(CUresult result)
{
	pthread_mutex_unlock(&mpsd_windows_lock);
	return result;
}

extern const char mpsd_vmm_outside[];	/* what is not followed, as `status` says it */
