/* SPDX-License-Identifier: MIT */
/* The pieces of zones.c, and the quarantine of those that were freed. All under the lock of zones.c. */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cover.h"

enum side {
	BEFORE,
	BEHIND,
	ITSELF,			/* in quarantine, its beginning */
	REST,			/* and the rest of it, which is sparse */
	SIDES,
};

struct piece {
	struct piece *next;	/* in its bucket while it lives; then in quarantine, or on its way out */
	uint64_t base;
	size_t size;
	CUdevice device;
	bool laid, bare;	/* it was tried; some side has none */
	uint64_t freed_ns;
	CUuuid gpu;
	struct mpsd_zone zones[SIDES];
};

/* Those that have their memory, by a hash of their address. */
#define MPSD_LIVING_BUCKETS 4096
extern struct piece *mpsd_living[MPSD_LIVING_BUCKETS];

void mpsd_living_add(struct piece *piece);
struct piece *mpsd_living_take(uint64_t base);
bool mpsd_living_is_any(void);

struct queue {
	struct piece *first, **last;
};

extern struct mpsd_quarantine {
	struct queue kept, out;		/* oldest first; those whose addresses are free again */
	uint64_t managed_bytes, managed_zones;
} mpsd_quarantine;

struct piece *mpsd_queue_take(struct queue *queue);

/* False: a zone cannot be taken away. It keeps its addresses for good; its row stays, so that it can be seen. */
bool mpsd_piece_unlay(struct piece *piece);

void mpsd_quarantine_add(struct piece *piece);

/* The oldest one. */
void mpsd_quarantine_let_out(void);
