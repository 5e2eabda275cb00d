// SPDX-License-Identifier: MIT
#include <stdlib.h>

#include "notes.h"
#include "pieces.h"

struct mpsd_quarantine mpsd_quarantine = {
	.kept = { NULL, &mpsd_quarantine.kept.first }, .out = { NULL, &mpsd_quarantine.out.first },
};

static void append(struct queue *queue, struct piece *piece)
{
	piece->next = NULL;
	*queue->last = piece;
	queue->last = &piece->next;
}

struct piece *mpsd_queue_take(struct queue *queue)
{
	struct piece *piece = queue->first;

	queue->first = piece->next;
	if (!queue->first)
		queue->last = &queue->first;
	return piece;
}

static void count_quarantine(const struct piece *piece, bool more)
{
	mpsd_ledger->quarantine_bytes += more ? piece->size : -piece->size;
	mpsd_ledger->quarantine_count += more ? 1 : -1ull;
	for (int side = 0; side < SIDES; side++) {
		if (piece->zones[side].kind != MPSD_ZONE_MANAGED)
			continue;
		mpsd_quarantine.managed_bytes += more ? piece->zones[side].size : -piece->zones[side].size;
		mpsd_quarantine.managed_zones += more ? 1 : -1ull;
	}
}

bool mpsd_piece_unlay(struct piece *piece)
{
	bool all = true;

	for (int side = 0; side < SIDES; side++)
		all &= mpsd_cover_take_away(&piece->zones[side]);
	return all;
}

void mpsd_quarantine_let_out(void)
{
	struct piece *piece = mpsd_queue_take(&mpsd_quarantine.kept);

	count_quarantine(piece, false);
	if (mpsd_piece_unlay(piece))
		append(&mpsd_quarantine.out, piece);
	else
		free(piece);
}

void mpsd_quarantine_add(struct piece *piece)
{
	append(&mpsd_quarantine.kept, piece);
	count_quarantine(piece, true);
}
