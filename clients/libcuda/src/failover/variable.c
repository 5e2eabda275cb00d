// SPDX-License-Identifier: MIT
/*
 * A module's variable lies at another address in each copy of the driver. One that the program has asked for is
 * found in the next copy by its name, and copies of it lead there. It is as the module was loaded, and with what the
 * host has put into it since. What the GPU may put there does not come along: nor does a program, from then on, that
 * hands its address to a kernel, copies into it from elsewhere, or reads it back; and after a move it is not read.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/spare.h"

#define MOST 256
#define MOST_BYTES ((size_t)16 << 20)	/* of one of them */

MPSD_READ_OFTEN atomic_uint mpsd_variables;
MPSD_READ_OFTEN struct mpsd_span mpsd_variables_span = MPSD_NO_SPAN;

/* What the host has put there. */
struct mpsd_parts {
	struct mpsd_parts *next;
	size_t offset, size;
	char bytes[];
};

static struct variable {
	CUdeviceptr name;	/* its address in the copy in which the program asked */
	size_t size;
	struct mpsd_parts *parts;	/* the oldest first */
} known[MOST];

static pthread_mutex_t parts_lock = PTHREAD_MUTEX_INITIALIZER;

/* Under the lock. NULL: there is none of that name. */
static struct variable *variable_of(const void *name)
{
	unsigned int count = atomic_load(&mpsd_variables), i = 0;

	while (i < count && known[i].name != (CUdeviceptr)name)
		i++;
	return i < count ? &known[i] : NULL;
}

/* How far into which; NULL: into none. An unloaded module's may be another's now, or memory. */
static const void *variable_at(CUdeviceptr address, CUdeviceptr *offset)
{
	unsigned int count = atomic_load_explicit(&mpsd_variables, memory_order_acquire);

	if (!mpsd_span_may_hold(&mpsd_variables_span, address))
		return NULL;
	for (unsigned int i = 0; i < count; i++) {
		*offset = address - known[i].name;
		if (*offset < known[i].size && mpsd_made_is((const void *)known[i].name, MPSD_MADE_VARIABLE))
			return (const void *)known[i].name;
	}
	return NULL;
}

bool mpsd_variable_is(CUdeviceptr address)
{
	CUdeviceptr offset;

	return variable_at(address, &offset) != NULL;
}

CUdeviceptr mpsd_variable_address(CUdeviceptr address)
{
	CUdeviceptr offset;
	const void *name = variable_at(address, &offset), *native = name ? mpsd_native(name) : NULL;

	if (!name)
		return address;
	return native ? (CUdeviceptr)native + offset : 0;
}

void mpsd_variable_written(CUdeviceptr address)
{
	CUdeviceptr offset;

	if (variable_at(address, &offset))
		mpsd_line_opaque("a copy into a module variable");
}

/* Whoever reads one back wants what kernels have put there, or the address of a function, which is this copy's. */
bool mpsd_variable_read(CUdeviceptr address)
{
	uint64_t moves = mpsd_moves_done();
	static atomic_bool said;
	const struct mpsd_made *made;
	CUdeviceptr offset;
	const void *name = variable_at(address, &offset);
	bool is;

	if (!name)
		return true;
	mpsd_line_opaque("a copy from a module variable");
	made = mpsd_made_look(name);
	is = !made || !made->of || made->of->since == moves;
	mpsd_made_looked();
	if (!is && !atomic_exchange(&said, true))
		mpsd_say("refusing to read a module variable: its contents were lost in a fail-over");
	return is;
}

void mpsd_variable_drop(struct mpsd_parts *part)
{
	while (part) {
		struct mpsd_parts *next = part->next;

		free(part);
		part = next;
	}
}

/* What it covers is gone. */
static bool keep(struct mpsd_parts **link, const void *bytes, size_t offset, size_t size)
{
	struct mpsd_parts *made = malloc(sizeof(*made) + size);
	size_t kept = size;

	if (!made)
		return false;
	*made = (struct mpsd_parts){ NULL, offset, size };
	memcpy(made->bytes, bytes, size);
	while (*link) {
		struct mpsd_parts *part = *link;

		if (part->offset >= offset && part->offset + part->size <= offset + size) {
			*link = part->next;
			free(part);
			continue;
		}
		kept += part->size;
		link = &part->next;
	}
	*link = made;
	return kept <= MOST_BYTES;
}

CUresult mpsd_variable_put(CUdeviceptr address, const void *bytes, size_t size, CUstream stream)
{
	CUresult result = CUDA_SUCCESS;
	CUdeviceptr offset;
	const void *name = variable_at(address, &offset);
	/* Pinned memory may be filled before it is read. */
	bool is = bytes && !mpsd_is_captured(stream) && (mpsd_exact() || !mpsd_is_pinned(bytes));
	struct variable *variable;

	if (!name || !size)
		return CUDA_SUCCESS;
	/* What is done again of before is to find what was there before. */
	if (mpsd_exact())
		result = mpsd_exact_settle();
	if (result != CUDA_SUCCESS)
		return result;
	/* Nor has all ended that was before it, where that waits for what the program, or its function, does next. */
	if (mpsd_exact() && bytes && mpsd_is_pinned(bytes) && (mpsd_epoch_is_unsure() || mpsd_hosts_are_open()))
		is = false;
	pthread_mutex_lock(&parts_lock);
	variable = variable_of(name);
	if (is && variable)
		is = size <= variable->size - offset && keep(&variable->parts, bytes, offset, size);
	pthread_mutex_unlock(&parts_lock);
	if (!is)
		mpsd_line_opaque("a copy into a module variable");
	return mpsd_made_again(name, mpsd_tables()->moves) ? CUDA_SUCCESS : MPSD_AGAIN;
}

/* What is there now, for who has no lock then. False: no memory. */
static bool copy_parts(const void *name, struct mpsd_parts **first)
{
	struct mpsd_parts **link = first;
	const struct variable *variable;
	bool is = true;

	*first = NULL;
	pthread_mutex_lock(&parts_lock);
	variable = variable_of(name);
	for (const struct mpsd_parts *part = variable ? variable->parts : NULL; part && is; part = part->next) {
		*link = malloc(sizeof(*part) + part->size);
		is = *link != NULL;
		if (!is)
			break;
		memcpy(*link, part, sizeof(*part) + part->size);
		(*link)->next = NULL;
		link = &(*link)->next;
	}
	pthread_mutex_unlock(&parts_lock);
	return is;
}

CUresult mpsd_variable_fill(const void *name, CUdeviceptr twin)
{
	struct mpsd_parts *parts;
	CUresult result = copy_parts(name, &parts) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

	for (const struct mpsd_parts *part = parts; part && result == CUDA_SUCCESS; part = part->next)
		result = other_cuMemcpyHtoD_v2(twin + part->offset, part->bytes, part->size);
	mpsd_variable_drop(parts);
	return result;
}

/* What was there until now. Where nobody knows the variable: what it was to have. */
static struct mpsd_parts *swap(const void *name, struct mpsd_parts *parts)
{
	struct mpsd_parts *before = parts;
	struct variable *variable;

	pthread_mutex_lock(&parts_lock);
	variable = variable_of(name);
	if (variable) {
		before = variable->parts;
		variable->parts = parts;
	}
	pthread_mutex_unlock(&parts_lock);
	return before;
}

struct mpsd_parts *mpsd_variable_take(const void *name)
{
	return swap(name, NULL);
}

void mpsd_variable_give(const void *name, struct mpsd_parts *parts)
{
	mpsd_variable_drop(swap(name, parts));
}

void mpsd_variables_child(void)
{
	parts_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

bool mpsd_variable_is_of(CUdeviceptr address, const void *function)
{
	CUdeviceptr offset;
	const void *name = variable_at(address, &offset);
	const struct mpsd_made *of;
	bool is;

	if (!name)
		return false;
	mpsd_made_lock();
	of = mpsd_made_origin(mpsd_made_find(function));
	is = !of || of == mpsd_made_origin(mpsd_made_find(name));
	mpsd_made_unlock();
	return is;
}

/* What was another copy's address may be what this one has answered with, or a part of that. */
static bool lies_in_another(CUdeviceptr name, size_t size)
{
	unsigned int count = atomic_load_explicit(&mpsd_variables, memory_order_acquire), i = 0;

	while (i < count && (known[i].name == name || known[i].name >= name + size || name >= known[i].name + known[i].size ||
			     !mpsd_made_is((const void *)known[i].name, MPSD_MADE_VARIABLE)))
		i++;
	return i < count;
}

/* False: there is no room. */
static bool know(CUdeviceptr name, size_t size)
{
	struct variable *variable;
	unsigned int count;
	bool is_new;

	pthread_mutex_lock(&parts_lock);
	count = atomic_load(&mpsd_variables);
	variable = variable_of((const void *)name);
	is_new = !variable && count < MOST;
	if (is_new)
		variable = &known[count];
	if (variable) {
		variable->name = name;
		variable->size = size;
		mpsd_span_widen(&mpsd_variables_span, name, size);
	}
	if (is_new)
		atomic_store_explicit(&mpsd_variables, count + 1, memory_order_release);
	pthread_mutex_unlock(&parts_lock);
	return variable != NULL;
}

static CUresult note(struct mpsd_made *record, CUdeviceptr *dptr, uint64_t moves)
{
	CUresult result = CUDA_SUCCESS;

	record->native = (void *)*dptr;
	if (!mpsd_made_add(record, moves)) {
		free(record->text);
		return MPSD_AGAIN;
	}
	*dptr = (CUdeviceptr)record->name;
	/* A name that is no address of the GPU's has no room for what comes after its first byte. */
	if (mpsd_spare_is(record->name) || lies_in_another(*dptr, record->size))
		result = mpsd_line_made(result, "a module variable at the address of another object");
	return know(*dptr, record->size) ? result : mpsd_line_made(result, "more module variables than the proxy can track");
}

static CUresult ask(const void *of, const char *name, CUdeviceptr *dptr, size_t *bytes, bool library)
{
	struct mpsd_made record = { .kind = MPSD_MADE_VARIABLE, .device = -1 };
	uint64_t moves = mpsd_tables()->moves;
	CUdeviceptr address = 0;
	int is_managed = 0;
	CUresult result;

	result = library ? inner_cuLibraryGetGlobal(&address, &record.size, mpsd_native((CUlibrary)of), name)
			 : inner_cuModuleGetGlobal_v2(&address, &record.size, mpsd_native((CUmodule)of), name);
	if (result != CUDA_SUCCESS)
		return result;
	mpsd_made_lock();
	record.of = mpsd_made_find(of);
	/* A module is one context's; a library's variable is that of the context that asks. */
	if (record.of)
		record.device = library ? mpsd_current_device() : record.of->device;
	mpsd_made_unlock();
	/* The host goes on with the pages of the copy that it got them from. */
	if (inner_cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address) == CUDA_SUCCESS && is_managed)
		mpsd_line_opaque("a managed module variable");
	record.text = record.of && address ? strdup(name) : NULL;
	result = record.text ? note(&record, &address, moves) : CUDA_SUCCESS;
	if (result != CUDA_SUCCESS)
		return result;
	if (dptr)
		*dptr = address;
	if (bytes)
		*bytes = record.size;
	return CUDA_SUCCESS;
}

CUresult make_cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)
{
	return ask(hmod, name, dptr, bytes, false);
}

CUresult make_cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	return ask(library, name, dptr, bytes, true);
}
