// SPDX-License-Identifier: MIT
/*
 * ownpages.c on pages of files that /proc/self/maps shows as the driver's. Prints "ok".
 */
#include "failover/ownpages.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "checking.h"
#include "failover/owned.h"
#include "failover/pins.h"
#include "uvm.h"
#include "window.h"

#define PAGE 4096ul
#define SIZE (33 * PAGE)	/* more than is read at once */
#define FILES "/memfd:shared (deleted)"
#define DRIVERS "/dev/nvidiactl"

bool mpsd_window_covers(uint64_t address, uint64_t size)
{
	(void)address;
	(void)size;
	return false;
}

static uint64_t pinned;

bool mpsd_pins_lie_in(uint64_t start, uint64_t end)
{
	return start <= pinned && pinned < end;
}

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);

/* The true mappings, except for the name. */
FILE *__wrap_fopen(const char *path, const char *mode)
{
	FILE *maps = __real_fopen(path, mode), *shown = tmpfile();
	char line[4352], *found;

	CHECK(maps && shown && !strcmp(path, "/proc/self/maps"));
	while (fgets(line, sizeof(line), maps)) {
		found = strstr(line, FILES);
		if (found)
			strcpy(found, DRIVERS "\n");
		fputs(line, shown);
	}
	fclose(maps);
	rewind(shown);
	return shown;
}

struct area {
	int file;
	volatile uint32_t *words;
};

/* The first word is 5, and so is the last word of each page but the second. */
static struct area area(int protection, int flags)
{
	struct area made = { memfd_create("shared", 0), NULL };

	CHECK(made.file >= 0 && !ftruncate(made.file, SIZE));
	for (uint64_t page = 0; page < SIZE / PAGE; page++)
		if (page != 1)
			CHECK(pwrite(made.file, &(uint32_t){ 5 }, 4, (off_t)(page * PAGE + PAGE - 4)) == 4);
	CHECK(pwrite(made.file, &(uint32_t){ 5 }, 4, 0) == 4);
	made.words = mmap(NULL, SIZE, protection, flags | MAP_32BIT, made.file, 0);
	CHECK(made.words != MAP_FAILED && (uintptr_t)made.words < 1ul << 36);
	return made;
}

static void mapped(unsigned int number, const struct area *area, uint64_t from, uint64_t size)
{
	uint64_t range[2] = { (uintptr_t)area->words + from, size };

	mpsd_owned_note(number, 0, MPSD_UVM_MAP_EXTERNAL, range);
}

/* Whether the area shows writes to the file. Its old content must be there in any case. */
static bool is_shared(const struct area *area)
{
	uint32_t before = area->words[1];

	for (uint64_t page = 0; page < SIZE / PAGE; page++)
		CHECK(area->words[(page + 1) * PAGE / 4 - 1] == (page == 1 ? 0 : 5));
	CHECK(area->words[0] == 5);
	CHECK(pwrite(area->file, &(uint32_t){ before + 1 }, 4, 4) == 4);
	return area->words[1] == before + 1;
}

static bool is_among(const struct area *area, const struct mpsd_pages *pages, unsigned int count)
{
	uint64_t from = (uintptr_t)area->words;

	for (unsigned int i = 0; i < count; i++)
		if (pages[i].from == from && pages[i].to == from + SIZE)
			return true;
	return false;
}

int main(void)
{
	static const unsigned int numbers[] = { 0, 1 };
	struct mpsd_pages found[16];
	struct area its = area(PROT_READ | PROT_WRITE, MAP_SHARED), pieces = area(PROT_READ | PROT_WRITE, MAP_SHARED);
	struct area read_only = area(PROT_READ, MAP_SHARED), both = area(PROT_READ | PROT_WRITE, MAP_SHARED);
	struct area unknown = area(PROT_READ | PROT_WRITE, MAP_SHARED), in_part = area(PROT_READ | PROT_WRITE, MAP_SHARED);
	struct area others = area(PROT_READ | PROT_WRITE, MAP_SHARED), cut = area(PROT_READ | PROT_WRITE, MAP_SHARED);
	struct area programs = area(PROT_READ | PROT_WRITE, MAP_SHARED);
	struct area *stay[] = { &both, &unknown, &in_part, &others, &cut, &programs };

	mapped(0, &its, 0, SIZE);
	mapped(0, &read_only, 0, SIZE);
	mapped(0, &pieces, 4 * PAGE, SIZE - 4 * PAGE);
	mapped(0, &pieces, 0, 4 * PAGE);
	mapped(0, &both, 0, SIZE);
	mapped(2, &both, SIZE - PAGE, PAGE);
	mapped(0, &in_part, 0, SIZE - PAGE);
	mapped(1, &others, 0, SIZE);
	mapped(0, &programs, 0, SIZE);
	pinned = (uintptr_t)programs.words + PAGE;
	/* The end of this area cannot be read. */
	mapped(0, &cut, 0, SIZE);
	CHECK(!ftruncate(cut.file, SIZE - PAGE));
	/* Areas of one instance, or of either of two; sharing with the program's own files does not matter. */
	CHECK(mpsd_pages_find(numbers, 1, found, 16) == 5 && mpsd_pages_find(numbers, 2, found, 16) == 6);
	CHECK(is_among(&its, found, 6) && is_among(&others, found, 6) && !is_among(&both, found, 6));
	CHECK(mpsd_pages_find(numbers, 2, found, 2) == 2 && !mpsd_pages_find(numbers, 0, found, 16));
	mpsd_pages_keep(0);
	CHECK(!ftruncate(cut.file, SIZE));
	CHECK(pwrite(cut.file, &(uint32_t){ 5 }, 4, SIZE - 4) == 4);
	CHECK(!is_shared(&its) && !is_shared(&pieces) && !is_shared(&read_only));
	for (unsigned int i = 0; i < sizeof(stay) / sizeof(*stay); i++)
		CHECK(is_shared(stay[i]));
	its.words[0] = 6;
	CHECK(its.words[0] == 6);
	/* A read-only area stays without access for writers. */
	CHECK(pread(its.file, (void *)read_only.words, 1, 0) < 0);
	/* Areas shared with another instance become private once that instance is gone. */
	mpsd_owned_forget(2);
	mpsd_pages_keep(0);
	CHECK(!is_shared(&both) && is_shared(&others));
	puts("ok");
	return 0;
}
