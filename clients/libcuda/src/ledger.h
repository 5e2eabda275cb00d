/* SPDX-License-Identifier: MIT */
/*
 * What the proxy notes of its allocations and guard zones, in shared memory of a fixed size (a memfd
 * named mpsd-ledger, sealed against shrinking, growing and further seals). The daemon gets it once, with
 * MPSD_VAULT_LEDGER, and reads it when a GPU fault names an address: mpsd/zones/ledger.py has the same
 * layout, and a test compares the two by what the compiler says.
 *
 * One process writes, others only read, and none of them trusts what it reads. A row is written under
 * its own sequence: odd while it is being written; a reader takes what had the same even one before and
 * after. Rows of notes are used again, the oldest freed one first; `notes_lost` counts live ones that had
 * no room. Times are CLOCK_MONOTONIC in nanoseconds, but for those of zones: CLOCK_MONOTONIC_RAW, by which
 * the driver dates the accesses that they absorb.
 */
#pragma once

#include <stdint.h>

#define MPSD_LEDGER_MAGIC 0x726764656c64706dull	/* "mpdledgr" */
#define MPSD_LEDGER_VERSION 2
#define MPSD_LEDGER_ZONES 8192
#define MPSD_LEDGER_NOTES 65536
#define MPSD_LEDGER_LAUNCHES 64
#define MPSD_LEDGER_NAMES 4096
#define MPSD_LEDGER_NAME_ROOM 112

enum mpsd_zone_kind {
	MPSD_ZONE_NONE = 0,		/* the row is free */
	MPSD_ZONE_MANAGED = 1,		/* absorbs and reports */
	MPSD_ZONE_SPARSE = 2,		/* absorbs, reports nothing */
};

enum mpsd_zone_role {
	MPSD_ZONE_GUARD = 0,		/* before or after a slab or a large allocation */
	MPSD_ZONE_QUARANTINE = 1,	/* where one was freed */
	MPSD_ZONE_NULL_PAGE = 2,
	MPSD_ZONE_FAR = 3,		/* far from all; only for who reads it (MPSD_VAULT_LEDGER's answer) */
};

struct mpsd_zone_row {
	uint32_t sequence;
	uint16_t kind, role;
	uint64_t start, end;
	uint64_t born_ns;		/* just after it was laid: what came before is no access to it */
};

struct mpsd_note_row {
	uint32_t sequence;
	uint32_t device;
	uint64_t address, size;		/* bytes asked for; size 0: the row is free */
	uint64_t order;			/* counts all allocations of this process, from 1 */
	uint64_t born_ns;
	uint64_t freed_ns;		/* 0: lives */
};

struct mpsd_launch_row {		/* the latest launches, a ring; no sequence: they may be torn */
	uint64_t function;		/* CUfunction or CUkernel */
	uint64_t stream;
};

struct mpsd_name_row {			/* names of functions, appended once, the sequence as above */
	uint32_t sequence;
	uint32_t reserved;
	uint64_t function;
	char name[MPSD_LEDGER_NAME_ROOM];	/* with a final zero; cut if longer */
};

struct mpsd_ledger {
	uint64_t magic;
	uint32_t version;
	uint32_t pid;
	uint64_t size;			/* of all this, in bytes */
	uint64_t launched;		/* launches so far; the next goes to row launched % LAUNCHES */
	uint64_t settled;		/* of those, known to have ended: `launched` before a wait that succeeded */
	uint64_t names_used;
	uint64_t notes_lost;
	uint64_t managed_bytes, sparse_bytes;	/* in zones now */
	uint64_t managed_zones, sparse_zones, uncovered;	/* uncovered: pieces with a side that has none */
	uint64_t quarantine_bytes, quarantine_count;
	uint64_t null_page;		/* 1: covered */
	uint64_t far_bytes, far_zones;	/* of the managed ones; 0 with whoever knows of none */
	uint64_t reserved[13];
	struct mpsd_zone_row zones[MPSD_LEDGER_ZONES];
	struct mpsd_note_row notes[MPSD_LEDGER_NOTES];
	struct mpsd_launch_row launches[MPSD_LEDGER_LAUNCHES];
	struct mpsd_name_row names[MPSD_LEDGER_NAMES];
};

_Static_assert(sizeof(struct mpsd_zone_row) == 32, "the layout is an interface");
_Static_assert(sizeof(struct mpsd_note_row) == 48, "the layout is an interface");
_Static_assert(sizeof(struct mpsd_name_row) == 128, "the layout is an interface");
_Static_assert(sizeof(struct mpsd_ledger) == 240 + 32 * MPSD_LEDGER_ZONES + 48 * MPSD_LEDGER_NOTES +
	       16 * MPSD_LEDGER_LAUNCHES + 128 * MPSD_LEDGER_NAMES, "the layout is an interface");
