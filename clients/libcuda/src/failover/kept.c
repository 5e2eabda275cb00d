// SPDX-License-Identifier: MIT
#include "failover/kept.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define ROOM 8192	/* descriptors beyond the program's own */
#define MANY 16384

static struct piece {
	CUdeviceptr base;
	int fd;
} *pieces;	/* in order of their bases */
static size_t count, room;

/* The first one at or behind `base`. */
static size_t place_of(CUdeviceptr base)
{
	size_t low = 0, high = count;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (pieces[middle].base < base)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/*
 * The program has as many of its own as before, and its numbers: those here are above what it may open where that can be
 * more, and above what it is likely to open where it may open many, or a quarter of few.
 */
static int lowest(void)
{
	static int first;
	struct rlimit limit;

	if (first || getrlimit(RLIMIT_NOFILE, &limit))
		return first;
	first = (int)(limit.rlim_cur - limit.rlim_cur / 4);
	if (limit.rlim_cur >= MANY + ROOM) {
		first = MANY;
	} else if (limit.rlim_max > limit.rlim_cur) {
		first = (int)limit.rlim_cur;
		limit.rlim_cur = limit.rlim_max - limit.rlim_cur > ROOM ? limit.rlim_cur + ROOM : limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
	return first;
}

static bool has_room(void)
{
	size_t more = room ? room * 2 : 64;
	struct piece *larger;

	if (count < room)
		return true;
	larger = realloc(pieces, more * sizeof(*pieces));
	if (!larger)
		return false;
	pieces = larger;
	room = more;
	return true;
}

int mpsd_kept_find(CUdeviceptr base)
{
	size_t at = place_of(base);

	return at < count && pieces[at].base == base ? pieces[at].fd : -1;
}

int mpsd_kept_high(int fd)
{
	int high = fcntl(fd, F_DUPFD_CLOEXEC, lowest());

	close(fd);
	return high;
}

bool mpsd_kept_add(CUdeviceptr base, int fd)
{
	int high = mpsd_kept_high(fd);
	size_t at = place_of(base);

	if (high >= 0 && !has_room()) {
		close(high);
		high = -1;
	}
	if (high < 0)
		return false;
	memmove(&pieces[at + 1], &pieces[at], (count - at) * sizeof(*pieces));
	pieces[at] = (struct piece){ base, high };
	count++;
	return true;
}

void mpsd_kept_drop(CUdeviceptr base)
{
	size_t at = place_of(base);

	if (at == count || pieces[at].base != base)
		return;
	close(pieces[at].fd);
	count--;
	memmove(&pieces[at], &pieces[at + 1], (count - at) * sizeof(*pieces));
}

void mpsd_kept_child(void)
{
	for (size_t i = 0; i < count; i++)
		close(pieces[i].fd);
	count = 0;
}
