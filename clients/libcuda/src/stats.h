/* SPDX-License-Identifier: MIT */
/*
 * What the proxy tells about itself, in shared memory of a fixed size (a sealed memfd named
 * mpsd-libcuda). Whoever may read the process's memory may read it: mpsd_libcuda/stats.py does.
 * The layout is an interface: new fields take reserved words or come at the end, anything else is a new version.
 */
#pragma once

#include <stdint.h>

#define MPSD_STATS_MAGIC 0x616475636473706dull	/* "mpsdcuda" */
#define MPSD_STATS_VERSION 1
#define MPSD_STATS_BYTES 8192
#define MPSD_UNKNOWN_MAX 64
#define MPSD_UNKNOWN_ROOM 88

enum mpsd_state {
	MPSD_LOADING = 0,
	MPSD_ACTIVE = 1,
	MPSD_ASIDE = 2,
	MPSD_NO_DRIVER = 3,
};

enum mpsd_window {
	MPSD_WINDOW_NOT_YET = 0,
	MPSD_WINDOW_AS_WANTED = 1,
	MPSD_WINDOW_ELSEWHERE = 2,	/* or smaller */
	MPSD_WINDOW_NONE = 3,		/* of some device: its memory is the driver's own */
};

struct mpsd_unknown {
	uint64_t count;
	char name[MPSD_UNKNOWN_ROOM];	/* written before count leaves 0 */
};

struct mpsd_stats {
	uint64_t magic;
	uint32_t version;
	uint32_t size;
	uint32_t pid;
	uint32_t state;			/* enum mpsd_state */
	uint32_t driver_version;	/* as cuDriverGetVersion says; 0: not asked yet */
	uint32_t names;			/* that this build has a stub for */
	uint32_t hidden;		/* of those the driver does not have */
	uint32_t added;			/* names of the driver that took a spare stub */
	uint32_t lacking;		/* names of the driver that found no stub */
	uint32_t reserved0;
	uint64_t asked;			/* calls of cuGetProcAddress, either version */
	uint64_t mapped;		/* of those, answered with a stub */
	uint64_t unmapped;		/* of those, answered with a pointer that is no exported function */
	uint64_t export_tables;		/* calls of cuGetExportTable */
	uint64_t vault_allocations;	/* of cuMemAlloc, in exportable memory */
	uint64_t vault_bytes;		/* asked for by those */
	uint64_t vault_mapped;		/* mapped for those */
	uint64_t vault_passed;		/* calls of cuMemAlloc that the driver had to answer itself, so far */
	uint64_t vault_taken;		/* pieces that the daemon holds too */
	uint64_t vault_refused;		/* that it did not take: a quota */
	uint64_t vault_lost;		/* that it never heard of: it is not there, or too slow */
	uint64_t ipc_shared;		/* handles that cuIpcGetMemHandle gave out for memory in a window */
	uint64_t ipc_opened;		/* handles of other processes that are open now */
	uint64_t ipc_failed;		/* calls that the vault could not answer, so far */
	uint64_t passed_pool;		/* allocations that are not vaulted, so far: of cuMemAllocAsync, */
	uint64_t passed_managed;	/* of cuMemAllocManaged, */
	uint64_t passed_host;		/* in host memory, */
	uint64_t passed_exportable;	/* of cuMemCreate, by the program itself */
	uint64_t window;		/* low two bits: enum mpsd_window; the rest: where the first one is */
	uint64_t host_guard;		/* bytes of the program's host memory that are under guard now */
	char reason[256];		/* why it stepped aside */
	char real_path[512];
	struct mpsd_unknown unknown[MPSD_UNKNOWN_MAX];
	/* 0 in what an earlier build tells, whose `size` ends here. All of MPSD_FAILOVER=validate: */
	uint64_t validated;		/* operations that were looked at, */
	uint64_t validate_unsure;	/* and that were not: they cannot be undone, which the daemon knows */
	uint64_t validate_strays;	/* pages written where no parameter leads */
	uint64_t validate_variables;	/* writes of variables of modules */
	uint64_t validate_unread;	/* images of code whose variables nobody knows, or that use the device's heap */
	char validate_first[128];	/* whose write of either kind was the first */
	uint64_t relayed;		/* launches that the program's threads have left to a thread of the proxy's */
	/* 0 in what an earlier build tells. All of mode `exact`: */
	uint64_t saved_periods;		/* of work that were measured, */
	uint64_t saved_bytes;		/* copied to snapshot buffers in them, */
	uint64_t saved_added_ns;	/* that this added to them, as far as is known, */
	uint64_t saved_rest_ns;		/* and the rest of their time */
	uint64_t left_budget;		/* enum mpsd_failover_budget: which one the program has left for; 0: none */
};

_Static_assert(sizeof(struct mpsd_stats) <= MPSD_STATS_BYTES, "the structure has grown too large");

extern struct mpsd_stats *mpsd_stats;

void mpsd_stats_start(void);
void mpsd_stats_unknown(const char *name);

#define mpsd_count(field) __atomic_fetch_add(&mpsd_stats->field, 1, __ATOMIC_RELAXED)
