// SPDX-License-Identifier: MIT
/*
 * remains.c on an imitated resource manager and UVM, which record their calls. Prints "ok".
 */
#include "failover/remains.h"

#include <stdarg.h>
#include <string.h>

#include "checking.h"
#include "debug.h"
#include "failover/descriptors.h"
#include "failover/ownpages.h"
#include "thread.h"
#include "uvm.h"

#define ALLOC_SHORT 0xc020462bul
#define ALLOC_LONG 0xc030462bul
#define FREE 0xc0104629ul
#define ROOT 0xc1d00001u
#define CONTROL 7	/* descriptors */
#define SPACE 8
#define CLOSED 9

static char asked[4096];
static uint64_t gives_back = 1;
static bool has_threads = true;
static unsigned int kept;

bool mpsd_descriptors_is(unsigned int number, int fd)
{
	return !number && fd != CLOSED;
}

uint64_t mpsd_debug_number(enum mpsd_debug field, uint64_t otherwise, uint64_t unit, uint64_t least, uint64_t most)
{
	CHECK(field == MPSD_DEBUG_RELEASE && otherwise == 1 && unit == 1 && !least && most == 1);
	return gives_back;
}

bool mpsd_thread_start(void *(*run)(void *), void *argument)
{
	if (has_threads)
		run(argument);
	return has_threads;
}

/* Called before the device's resources are freed. */
void mpsd_pages_keep(unsigned int number)
{
	CHECK(!number && !asked[0]);
	kept++;
}

int __wrap_ioctl(int fd, unsigned long request, ...);

int __wrap_ioctl(int fd, unsigned long request, ...)
{
	char *end = asked + strlen(asked);
	size_t room = sizeof(asked) - (size_t)(end - asked);
	va_list more;
	uint32_t *words;

	va_start(more, request);
	words = va_arg(more, uint32_t *);
	va_end(more);
	if (request == FREE)
		snprintf(end, room, "%d free %x of %x;", fd, words[2], words[1]);
	else if (request == MPSD_UVM_UNREGISTER_SPACE)
		snprintf(end, room, "%d unregister %x;", fd, words[0]);
	else
		CHECK(!"nothing else is asked");
	words[request == FREE ? 3 : 4] = 0;
	return 0;
}

static void allocate(int fd, unsigned long request, uint32_t class, uint32_t object, uint32_t status)
{
	uint32_t words[12] = { ROOT, ROOT, object, class };

	words[request == ALLOC_LONG ? 10 : 7] = status;
	mpsd_remains_note(fd, request, words);
}

static void registered(int fd, uint32_t gpu, unsigned long request)
{
	uint32_t words[8] = { gpu };

	mpsd_remains_note(fd, request, words);
}

static void ends(const char *as)
{
	CHECK(mpsd_remains_end() == has_threads);
	if (strcmp(asked, as))
		fprintf(stderr, "asked: %s\n", asked);
	CHECK(!strcmp(asked, as));
	asked[0] = '\0';
}

int main(void)
{
	uint32_t freed[4] = { ROOT, ROOT, 3, 0 }, refused[4] = { ROOT, ROOT, 2, 0x57 };

	ends("");
	allocate(CONTROL, ALLOC_LONG, 0x80, 1, 0);
	allocate(CONTROL, ALLOC_SHORT, 0x80, 2, 0);
	allocate(CONTROL, ALLOC_LONG, 0x80, 3, 0);
	/* A freed object takes its children along, and a refused object does not exist. */
	allocate(CONTROL, ALLOC_LONG, 0xc86f, 4, 0);
	allocate(CONTROL, ALLOC_LONG, 0x80, 5, 0x56);
	allocate(CONTROL, ALLOC_SHORT, 0x80, 6, 0x56);
	allocate(CLOSED, ALLOC_LONG, 0x80, 7, 0);
	mpsd_remains_note(CONTROL, FREE, freed);
	mpsd_remains_note(CONTROL, FREE, refused);
	registered(SPACE, 0xaa, MPSD_UVM_REGISTER_SPACE);
	registered(SPACE, 0xaa, MPSD_UVM_REGISTER_SPACE);
	registered(SPACE, 0xbb, MPSD_UVM_REGISTER_SPACE);
	registered(SPACE, 0xbb, MPSD_UVM_UNREGISTER_SPACE);
	registered(CLOSED, 0xcc, MPSD_UVM_REGISTER_SPACE);
	/* A release without a thread is tried again later. */
	has_threads = false;
	ends("");
	has_threads = true;
	/* UVM is released first. */
	ends("8 unregister aa;7 free 2 of c1d00001;7 free 1 of c1d00001;");
	ends("");
	allocate(CONTROL, ALLOC_LONG, 0x80, 8, 0);
	gives_back = 0;
	ends("");
	gives_back = 1;
	ends("7 free 8 of c1d00001;");
	CHECK(kept == 4);
	/* More objects than the table holds: the known ones are released. */
	for (uint32_t object = 1; object < 100; object++)
		allocate(CONTROL, ALLOC_LONG, 0x80, object, 0);
	mpsd_remains_end();
	CHECK(strstr(asked, "free 10 of") && !strstr(asked, "free 11 of"));
	puts("ok");
	return 0;
}
