// SPDX-License-Identifier: MIT
/*
 * In the pages that a copy of the driver shares with the GPU are its command buffers, and the words in which kernels mark
 * that they run and have ended. Those of kernels that were lost say for good that they run: the first copy is never
 * unloaded, and mpsd, which looks at these words when a program ends, took what had been in flight when its first domain was lost
 * for a kernel that does not end, and the domain in which it had lived since for poisoned. (Seen on an H200, of programs that ended long
 * after.) So such pages are exchanged for ordinary ones that hold the same: the copy finds what it had, and nobody else
 * takes them for the GPU's.
 *
 * Whose pages they are is known by what the copy has mapped for its GPU, which lies at the same addresses there. Memory of
 * the program's that later copies register is none of them.
 */
#include "failover/ownpages.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "failover/owned.h"
#include "failover/pins.h"

#define LINE 4352		/* a path, and what stands before it */
#define LOW_END (1ull << 36)	/* above it are ordinary mappings, and none of these */
#define PAGE 4096u
#define PIECE (16 * PAGE)

static bool is_shared(const char *line, uint64_t *from, uint64_t *to, int *protection)
{
	unsigned long long first, last;
	char rights[8], path[32];

	if (sscanf(line, "%llx-%llx %7s %*s %*s %*s %31s", &first, &last, rights, path) != 4)
		return false;
	*from = first;
	*to = last;
	*protection = PROT_READ | (rights[1] == 'w' ? PROT_WRITE : 0);
	return last <= LOW_END && rights[0] == 'r' && rights[3] == 's' && !strcmp(path, "/dev/nvidiactl");
}

/* By a file: what cannot be read ends no program. Most pages were never used, and need no memory. */
static bool copy_pages(int memory, uint64_t from, uint64_t size, char *to)
{
	static const char none[PAGE];
	static char piece[PIECE];

	for (uint64_t at = 0; at < size; at += PIECE) {
		size_t length = size - at < PIECE ? size - at : PIECE;

		if (pread(memory, piece, length, (off_t)(from + at)) != (ssize_t)length)
			return false;
		for (size_t page = 0; page < length; page += PAGE)
			if (memcmp(piece + page, none, PAGE) != 0)
				memcpy(to + at + page, piece + page, PAGE);
	}
	return true;
}

/* What was read of it is a while ago. */
static bool is_still_there(const char *line)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char now[LINE];
	bool is = false;

	while (maps && !is && fgets(now, sizeof(now), maps))
		is = !strcmp(now, line);
	if (maps)
		fclose(maps);
	return is;
}

/* All at once, for whoever reads there all the same. What does not work out leaves them as they are. */
static void exchange(int memory, const char *line, uint64_t from, uint64_t size, int protection)
{
	char *own = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (own == MAP_FAILED)
		return;
	if (!copy_pages(memory, from, size, own) || mprotect(own, size, protection) || !is_still_there(line) ||
	    mremap(own, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)from) == MAP_FAILED)
		munmap(own, size);
}

static bool is_of_any(const unsigned int *numbers, unsigned int count, uint64_t from, uint64_t to)
{
	for (unsigned int i = 0; i < count; i++)
		if (mpsd_owned_alone(numbers[i], from, to))
			return true;
	return false;
}

unsigned int mpsd_pages_find(const unsigned int *numbers, unsigned int count, struct mpsd_pages *found, unsigned int most)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	unsigned int there = 0;
	char line[LINE];
	uint64_t from, to = 0;
	int protection;

	while (maps && there < most && fgets(line, sizeof(line), maps))
		if (is_shared(line, &from, &to, &protection) && is_of_any(numbers, count, from, to))
			found[there++] = (struct mpsd_pages){ from, to };
		else if (to > LOW_END)
			break;
	if (maps)
		fclose(maps);
	return there;
}

void mpsd_pages_keep(unsigned int number)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC), protection;
	char line[LINE];
	uint64_t from, to;

	while (maps && memory >= 0 && fgets(line, sizeof(line), maps))
		if (is_shared(line, &from, &to, &protection) && mpsd_owned_alone(number, from, to) &&
		    !mpsd_pins_lie_in(from, to))
			exchange(memory, line, from, to - from, protection);
	if (maps)
		fclose(maps);
	if (memory >= 0)
		close(memory);
}
