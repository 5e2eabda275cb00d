// SPDX-License-Identifier: MIT
/* The ring behind a pipe: request (what, argument), answer (result, seq, owner, address, written). */
#include "mpsd-ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORDS 5

enum request { NEW_RING, PUT, TAKE, HAS, DRAIN };

static struct mpsd_ring *ring;

static void new_ring(void)
{
	free(ring);
	ring = calloc(1, sizeof(*ring));
	if (!ring)
		exit(2);
}

/* Owners are numbers here. */
static __u64 number(void *owner)
{
	return (__u64)(unsigned long)owner;
}

static __u64 put(__u64 address, __u64 owner)
{
	struct mpsd_record record = { .address = address, .seq = 12345 };

	return number(mpsd_ring_put(ring, &record, (void *)(unsigned long)owner));
}

static void perform(const __u64 *word, __u64 *answer)
{
	struct mpsd_ring_entry entry = { .owner = NULL };
	__u64 position = word[1];
	void *owner = NULL;

	switch (word[0]) {
	case NEW_RING:
		new_ring();
		break;
	case PUT:
		answer[0] = put(word[1], word[2]);
		break;
	case TAKE:
		answer[0] = mpsd_ring_take(ring, &position, &entry);
		if (answer[0] && position != entry.record.seq)
			exit(4);
		answer[1] = position;
		answer[2] = number(entry.owner);
		answer[3] = entry.record.address;
		break;
	case HAS:
		answer[0] = mpsd_ring_has(ring, position);
		break;
	case DRAIN:
		answer[0] = mpsd_ring_drain(ring, &owner);
		answer[2] = number(owner);
		break;
	default:
		exit(3);
	}
	answer[4] = ring->written;
}

int main(void)
{
	__u64 word[WORDS];

	setbuf(stdin, NULL);
	new_ring();
	while (fread(word, sizeof(word), 1, stdin) == 1) {
		__u64 answer[WORDS] = { 0 };

		perform(word, answer);
		if (fwrite(answer, sizeof(answer), 1, stdout) != 1 || fflush(stdout))
			return 1;
	}
	free(ring);
	ring = NULL;
	return 0;
}
