// SPDX-License-Identifier: MIT
/* Stepping aside: from then on the program talks to the real driver, as if there were no proxy. */
#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "elfview.h"
#include "proxy.h"
#include "stats.h"

/* Drivers of CUDA 12.4 up to, not including, 14.0: what the wrappers were written for. */
#define OLDEST_DRIVER 12040
#define TOO_NEW_DRIVER 14000

/* One write, so that lines of several processes do not mix; stdio is the program's own. */
void mpsd_say(const char *format, ...)
{
	char line[1024], *text = line, *longer = NULL;
	size_t head = (size_t)snprintf(line, sizeof(line), "mpsd-libcuda[%d]: ", (int)getpid()), length;
	va_list arguments;

	va_start(arguments, format);
	length = head + (size_t)vsnprintf(line + head, sizeof(line) - head, format, arguments);
	va_end(arguments);
	/* A list of kernels may be longer, and half of one misleads. */
	if (length >= sizeof(line))
		longer = malloc(length + 1);
	if (longer) {
		memcpy(longer, line, head);
		va_start(arguments, format);
		vsnprintf(longer + head, length + 1 - head, format, arguments);
		va_end(arguments);
		text = longer;
	} else if (length >= sizeof(line)) {
		length = sizeof(line) - 1;
	}
	text[length++] = '\n';	/* in the place of the end */
	if (write(STDERR_FILENO, text, length) < 0)
		length = 0;	/* a program without stderr gets no messages */
	free(longer);
}

/* The stubs stay, for the program has pointers to them; each one leads to the real function now. */
void mpsd_step_aside(const char *reason)
{
	uint32_t active = MPSD_ACTIVE;

	for (unsigned int i = 0; i < MPSD_WRAPPERS; i++) {
		unsigned int index = mpsd_wrappers[i].index;

		if (mpsd_real[index])
			__atomic_store_n(&mpsd_table[index], mpsd_real[index], __ATOMIC_RELEASE);
	}
	if (!__atomic_compare_exchange_n(&mpsd_stats->state, &active, MPSD_ASIDE, false,
					 __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		return;
	snprintf(mpsd_stats->reason, sizeof(mpsd_stats->reason), "%s", reason);
	mpsd_say("pass-through: %s; the program runs without mpsd's protection", reason);
}

/* As dl_iterate_phdr says it, which need not be where the object begins. */
static ElfW(Addr) base, driver_base;

/*
 * Asked while this library is loaded. Later dladdr1() would wait for a thread that is in dlopen(), and a constructor
 * there may wait for cuInit.
 */
void mpsd_aside_prepare(const struct elfview *driver)
{
	struct link_map *map = NULL;
	Dl_info info;

	driver_base = driver->base;
	if (dladdr1(mpsd_stubs, &info, (void **)&map, RTLD_DL_LINKMAP) && map)
		base = map->l_addr;
}

struct search {
	char *reason;
	size_t size;
};

/* Another libcuda beside ours and the one behind it: some part of the program opened it by its path. */
static int is_another(struct dl_phdr_info *object, size_t size, void *context)
{
	struct search *search = context;
	struct elfview view;

	(void)size;
	if (object->dlpi_addr == base || object->dlpi_addr == driver_base)
		return 0;
	if (!mpsd_elfview_of_object(object, &view) || !view.soname ||
	    strncmp(view.soname, "libcuda.so", strlen("libcuda.so")) != 0)
		return 0;
	snprintf(search->reason, search->size, "the program has loaded another libcuda (%s)",
		 object->dlpi_name);
	return 1;
}

/* NULL when nothing speaks against the proxy. Asked by the first cuInit. */
const char *mpsd_reason_to_step_aside(void)
{
	static char reason[256];
	struct search search = { .reason = reason, .size = sizeof(reason) };
	int version = 0;

	if (real_cuDriverGetVersion(&version) != CUDA_SUCCESS)
		return "the driver does not report its version";
	mpsd_stats->driver_version = (uint32_t)version;
	if (version < OLDEST_DRIVER || version >= TOO_NEW_DRIVER) {
		snprintf(reason, sizeof(reason),
			 "the driver is for CUDA %d.%d, but mpsd's libcuda supports 12.4 to 13.x",
			 version / 1000, version % 1000 / 10);
		return reason;
	}
	return dl_iterate_phdr(is_another, &search) ? reason : NULL;
}
