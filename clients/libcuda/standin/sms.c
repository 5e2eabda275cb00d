// SPDX-License-Identifier: MIT
/*
 * What stands for the resource manager where the driver's library asks it: it makes the objects of a context, maps its code
 * (the first pages of this library are that), and says what SMs keep of an exception: with MPSD_STANDIN_EXCEPTION, a file, that the last
 * one had a warp at the address that is there in hexadecimal digits. All else is none of its calls.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#include "standin.h"

#define ALLOC 0xc030462bul
#define DUPLICATE 0xc01c4634ul
#define CONTROL 0xc020462aul
#define MAP_EXTERNAL 33ul
#define READ 0x83de030cu
#define ROOT 1u
#define DEVICE 3u
#define SMS 4u		/* as device.c has it */
#define CODE_BYTES ((uint64_t)64 << 10)

struct object {
	uint32_t root, parent, name, class;
	uint64_t parameters, rights;
	uint32_t size, flags, status, padding;
};

struct control {
	uint32_t client, object, command, flags;
	uint64_t parameters;
	uint32_t size, status;
};

struct states {
	uint32_t channel, count;
	struct {
		uint32_t registers[6];
		uint64_t address, pc;
		uint32_t cluster[2];
	} of[100];
	uint32_t old_fault, fault[2], first;
};

static const struct object objects[] = {
	{ ROOT, 15, 29, 0xc86f, 0, 0, 0, 0, 0, 0 },
	{ ROOT, DEVICE, 121, 0x83de, 0, 0, 0, 0, 0, 0 },
};

void sms_make(int device)
{
	uint64_t code[2] = { 0, CODE_BYTES };
	Dl_info library;

	uint32_t group[7] = { ROOT, DEVICE, 15, 2, 15, 0, 0 };	/* the server's */

	ioctl(device, DUPLICATE, group);
	for (size_t i = 0; i < sizeof(objects) / sizeof(*objects); i++) {
		struct object object = objects[i];

		ioctl(device, ALLOC, &object);
	}
	if (!dladdr(objects, &library))
		return;
	code[0] = (uint64_t)library.dli_fbase;
	ioctl(device, MAP_EXTERNAL, code);
}

static bool is_there(uint64_t *pc)
{
	const char *path = getenv("MPSD_STANDIN_EXCEPTION");
	FILE *file = path ? fopen(path, "re") : NULL;
	unsigned long long read = 0;
	bool is = file && fscanf(file, "%llx", &read) == 1;

	if (file)
		fclose(file);
	*pc = read;
	return is;
}

static bool read_states(const struct control *control)
{
	struct states *states = (struct states *)control->parameters;
	uint64_t pc;

	if (!states || control->size != sizeof(*states) || control->client != ROOT || control->object != 121 ||
	    states->channel != 29 || states->first + states->count > SMS)
		return false;
	if (is_there(&pc) && states->first + states->count == SMS)
		states->of[states->count - 1].pc = pc;
	return true;
}

API int standinManager(int fd, unsigned long request, void *argument);

API int standinManager(int fd, unsigned long request, void *argument)
{
	struct control *control = argument;

	if (request == ALLOC || request == DUPLICATE || request == MAP_EXTERNAL)
		return 0;
	(void)fd;
	if (request != CONTROL || control->command != READ || !control->parameters) {
		errno = ENOTTY;
		return -1;
	}
	control->status = read_states(control) ? 0 : 0x1f;
	return 0;
}
