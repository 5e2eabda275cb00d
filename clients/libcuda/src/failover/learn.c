// SPDX-License-Identifier: MIT
/* Functions that came by a way that is not followed: the driver says what they are called, and of what they are. */
#include <stdlib.h>
#include <string.h>

#include "failover/made.h"

struct library {
	struct library *next;
	CUlibrary native;
};

/* Those that are known now: the driver is asked without the lock, of what another thread may unload meanwhile. */
static struct library *known_libraries(void)
{
	struct library *first = NULL, *library;

	mpsd_made_lock();
	for (struct mpsd_made *made = mpsd_made_oldest(); made; made = made->newer) {
		if (made->kind != MPSD_MADE_LIBRARY || !(library = malloc(sizeof(*library))))
			continue;
		*library = (struct library){ first, made->native };
		first = library;
	}
	mpsd_made_unlock();
	return first;
}

static struct mpsd_made *noted(struct mpsd_made record, const char *name)
{
	record.device = mpsd_current_device();
	record.text = name ? strdup(name) : NULL;
	if (!record.of || (name && !record.text) || !mpsd_made_add(&record, 0)) {
		free(record.text);
		return NULL;
	}
	return mpsd_made_known(record.native);
}

/*
 * A library's kernel of that name whose function it is. What is looked for by its name loads no more than that function;
 * a library's module would be all of it.
 */
static struct mpsd_made *of_library(CUfunction function, const char *name)
{
	struct mpsd_made *found = NULL;
	struct mpsd_asked asked;
	struct library *next;

	for (struct library *library = known_libraries(); library; library = next) {
		CUfunction its = NULL;
		bool is = !found && mpsd_ask_begin(&asked, library->native);
		CUkernel kernel;

		next = library->next;
		if (is && real_cuLibraryGetKernel(&kernel, library->native, name) == CUDA_SUCCESS &&
		    real_cuKernelGetFunction(&its, kernel) == CUDA_SUCCESS && its == function) {
			struct mpsd_made part = { .kind = MPSD_MADE_KERNEL, .native = kernel,
						  .of = mpsd_made_known(library->native) };
			struct mpsd_made whole = { .kind = MPSD_MADE_KERNEL_FUNCTION, .native = function,
						   .of = noted(part, name) };

			found = noted(whole, NULL);
		}
		if (is)
			mpsd_ask_end(&asked);
		free(library);
	}
	return found;
}

struct mpsd_made *mpsd_made_learn(CUfunction function)
{
	const struct mpsd_tables *tables = mpsd_tables();
	struct mpsd_made *made = mpsd_made_known(function);
	const char *name = NULL;
	CUmodule module;

	/* What the first copy did not give can be any copy's. */
	if (made || !function || tables->moves || !tables->real[MPSD_cuFuncGetName] ||
	    !tables->real[MPSD_cuFuncGetModule])
		return made;
	if (real_cuFuncGetName(&name, function) != CUDA_SUCCESS || !name ||
	    real_cuFuncGetModule(&module, function) != CUDA_SUCCESS)
		return NULL;
	made = mpsd_made_known(module);
	if (made && (made->kind == MPSD_MADE_MODULE || made->kind == MPSD_MADE_LIBRARY_MODULE))
		return noted((struct mpsd_made){ .kind = MPSD_MADE_FUNCTION, .native = function, .of = made }, name);
	return of_library(function, name);
}
