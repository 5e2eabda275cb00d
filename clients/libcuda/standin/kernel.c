// SPDX-License-Identifier: MIT
/* Kernels: their attributes, their launch, and how many of them fit. */
#include <stdio.h>
#include <string.h>

#include "standin.h"

void start_attributes(struct CUfunc_st *function)
{
	function->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
	function->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = SHARED_BYTES;
	function->attributes[CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = -1;
}

/* The others say what the kernel is. */
static bool may_be_set(CUfunction_attribute attribute)
{
	return attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ||
	       attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT ||
	       (attribute >= CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH &&
		attribute <= CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
}

/* As enter(), and a handle that is none leaves with its error. */
static CUresult enter_of(const struct CUfunc_st *handle, struct CUfunc_st **function)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	*function = find_function(handle);
	return *function ? CUDA_SUCCESS : leave(CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)
{
	struct CUfunc_st *function;
	CUresult result = enter_of(hfunc, &function);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pi || (unsigned int)attrib >= CU_FUNC_ATTRIBUTE_MAX)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*pi = function->attributes[attrib];
	return leave(CUDA_SUCCESS);
}

API CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
	struct CUfunc_st *function;
	CUresult result = enter_of(hfunc, &function);

	if (result != CUDA_SUCCESS)
		return result;
	if (!may_be_set(attrib) || value < (attrib == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT ? -1 : 0) ||
	    (attrib == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value > MOST_SHARED_BYTES))
		return leave(CUDA_ERROR_INVALID_VALUE);
	function->attributes[attrib] = value;
	return leave(CUDA_SUCCESS);
}

API CUresult cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)
{
	return !is_device(dev) ? CUDA_ERROR_INVALID_DEVICE : cuFuncGetAttribute(pi, attrib, (CUfunction)kernel);
}

API CUresult cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)
{
	return !is_device(dev) ? CUDA_ERROR_INVALID_DEVICE : cuFuncSetAttribute((CUfunction)kernel, attrib, val);
}

API CUresult cuFuncLoad(CUfunction function)
{
	struct CUfunc_st *found;
	CUresult result = enter_of(function, &found);

	if (result != CUDA_SUCCESS)
		return result;
	found->loaded = true;
	return leave(CUDA_SUCCESS);
}

API CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
	struct CUfunc_st *found;
	CUresult result = enter_of(function, &found);

	if (result != CUDA_SUCCESS)
		return result;
	if (!state)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*state = found->loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
	return leave(CUDA_SUCCESS);
}

API CUresult cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t *paramOffset, size_t *paramSize)
{
	struct CUfunc_st *function;
	size_t offset = 0;
	/* cuda.h knows of no other error. */
	CUresult result = func ? enter_of(func, &function) : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS)
		return result;
	if (!paramOffset || paramIndex >= function->builtin->parameters)
		return leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < paramIndex; i++)
		offset += function->builtin->sizes[i];
	*paramOffset = offset;
	if (paramSize)
		*paramSize = function->builtin->sizes[paramIndex];
	result = leave(CUDA_SUCCESS);
	gate_keep(GATE_PARAMETERS);
	return result;
}

API CUresult cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t *paramOffset, size_t *paramSize)
{
	return cuFuncGetParamInfo((CUfunction)kernel, paramIndex, paramOffset, paramSize);
}

static void run_kernel(struct operation *operation)
{
	pthread_rwlock_rdlock(&gpu_memory);
	operation->kernel.builtin->run(operation->kernel.arguments);
	pthread_rwlock_unlock(&gpu_memory);
}

/* What was asked for is never less than what any function may have. */
static unsigned int most_shared(const struct CUfunc_st *function)
{
	int asked = function->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES];

	return (unsigned int)(asked > SHARED_BYTES ? asked : SHARED_BYTES);
}

/* Parameters are copied now: the caller may change them as soon as the call returns. */
CUresult prepare_kernel(const CUDA_KERNEL_NODE_PARAMS *given, struct operation *operation)
{
	struct CUfunc_st *function;

	if (!given)
		return CUDA_ERROR_INVALID_VALUE;
	function = find_function(given->func ? given->func : (CUfunction)given->kern);
	*operation = (struct operation){ .run = run_kernel, .type = CU_GRAPH_NODE_TYPE_KERNEL };
	if (!function)
		return CUDA_ERROR_INVALID_HANDLE;
	if (given->extra || (function->builtin->parameters && !given->kernelParams) || !given->gridDimX ||
	    !given->gridDimY || !given->gridDimZ || !given->blockDimX || !given->blockDimY || !given->blockDimZ ||
	    given->blockDimX * given->blockDimY * given->blockDimZ > 1024 ||
	    given->sharedMemBytes > most_shared(function))
		return CUDA_ERROR_INVALID_VALUE;
	function->loaded = true;
	operation->duration_ns = function->duration_ns;
	operation->kernel.builtin = function->builtin;
	for (size_t i = 0; i < function->builtin->parameters; i++)
		memcpy(&operation->kernel.arguments[i], given->kernelParams[i], function->builtin->sizes[i]);
	operation->kernel.arguments[HIDDEN_ARGUMENTS] = given->gridDimX;
	operation->kernel.arguments[HIDDEN_ARGUMENTS + 1] = first_global(function);
	operation->kernel.arguments[HIDDEN_ARGUMENTS + 2] = given->gridDimY;
	return CUDA_SUCCESS;
}

/* The proxy's own. */
static bool is_for_saves(CUfunction given)
{
	const struct CUfunc_st *function = find_function(given);

	return function && !strcmp(function->name, "mpsd_save_ranges");
}

static bool begins_saves(unsigned int ranges)
{
	char text[32];

	snprintf(text, sizeof(text), "copies %u ranges", ranges);
	note(text);
	return !refuses_saves();
}

API CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
			    unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
			    unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
	const CUDA_KERNEL_NODE_PARAMS given = { f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
						sharedMemBytes, kernelParams, extra, NULL, NULL };
	struct operation operation;
	CUcontext context;
	CUstream stream;
	CUresult result;

	gate_keep(GATE_LAUNCH);
	result = enter(&context);
	if (result != CUDA_SUCCESS)
		return result;
	if (gate_wants(GATE_NO_LAUNCH))
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	if (find_stream(context, hStream, &stream) != CUDA_SUCCESS)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (is_for_saves(f) && !begins_saves(gridDimY))
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	result = prepare_kernel(&given, &operation);
	return leave(result == CUDA_SUCCESS ? submit(stream, &operation) : result);
}

static void take_attribute(CUlaunchAttribute *given, CUfunction function)
{
	CUlaunchAttributeValue *value = &given->value;

	/* Kernels never overlap here: that one may is all that is seen of it. */
	if (given->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
	    value->programmaticStreamSerializationAllowed)
		note("may overlap");
	/* Nor does any change a node; but the node has its name. */
	if (given->id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE &&
	    value->deviceUpdatableKernelNode.deviceUpdatable)
		value->deviceUpdatableKernelNode.devNode = (CUgraphDeviceNode)function;
}

/* What a captured one has its node has. */
static CUresult keep_attributes(const CUlaunchConfig *config)
{
	CUstream stream;
	CUresult result = config->numAttrs ? enter_stream(config->hStream, &stream) : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS)
		return CUDA_SUCCESS;
	for (unsigned int i = 0; stream->capture && i < config->numAttrs; i++)
		if (config->attrs[i].id < NODE_ATTRIBUTES)
			stream->place.nodes[0]->attributes[config->attrs[i].id] = config->attrs[i].value;
	return leave(CUDA_SUCCESS);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
	CUresult result;

	if (!config)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned int i = 0; i < config->numAttrs; i++)
		take_attribute(&config->attrs[i], f);
	result = cuLaunchKernel(f, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
			      config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream,
			      kernelParams, extra);
	return result == CUDA_SUCCESS ? keep_attributes(config) : result;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, CUfunction func, int blockSize,
								  size_t dynamicSMemSize, unsigned int flags)
{
	(void)func;
	(void)dynamicSMemSize;
	(void)flags;
	if (!numBlocks || blockSize <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	*numBlocks = blockSize > 1024 ? 0 : 2048 / blockSize;
	return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, CUfunction func, int blockSize,
							 size_t dynamicSMemSize)
{
	return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize, dynamicSMemSize, 0);
}

API CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *dynamicSmemSize, CUfunction func, int numBlocks,
						     int blockSize)
{
	(void)func;
	if (!dynamicSmemSize || numBlocks <= 0 || blockSize <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	*dynamicSmemSize = (size_t)MOST_SHARED_BYTES / (size_t)numBlocks;
	return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveClusters(int *numClusters, CUfunction func, const CUlaunchConfig *config)
{
	(void)func;
	if (!numClusters || !config)
		return CUDA_ERROR_INVALID_VALUE;
	*numClusters = 16;
	return CUDA_SUCCESS;
}
