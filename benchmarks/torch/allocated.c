/* Counts what PyTorch's allocator for the CPU has allocated, in all threads of a process.

   It asks for aligned memory, as nothing else in a training does for much. Loaded before the C
   library (LD_PRELOAD); what it counts is read by ctypes. Before much is allocated it waits for a
   moment: threads of gloo let go of tensors when they are scheduled, which is no matter of a step. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#define PLACES (1u << 20)
#define MUCH (1u << 16)
#define MOMENT_MICROSECONDS 300

static struct { void *start; size_t size; } known[PLACES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t live, most;

static unsigned place_of(const void *start) { return ((uintptr_t)start >> 6) * 2654435761u % PLACES; }

int posix_memalign(void **memory, size_t alignment, size_t size) {
  static int (*next)(void **, size_t, size_t);
  if (!next) next = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  if (size >= MUCH) usleep(MOMENT_MICROSECONDS);
  int error = next(memory, alignment, size);
  if (error) return error;
  pthread_mutex_lock(&lock);
  unsigned place = place_of(*memory);
  while (known[place].start && known[place].size) place = (place + 1) % PLACES;
  known[place].start = *memory;
  known[place].size = size;
  live += size;
  if (live > most) most = live;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *memory) {
  static void (*next)(void *);
  if (!next) next = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  if (memory && !((uintptr_t)memory & 63)) {
    pthread_mutex_lock(&lock);
    /* A place that is given back keeps its start, so that a search goes on behind it. */
    for (unsigned place = place_of(memory); known[place].start; place = (place + 1) % PLACES)
      if (known[place].start == memory && known[place].size) {
        live -= known[place].size;
        known[place].size = 0;
        break;
      }
    pthread_mutex_unlock(&lock);
  }
  next(memory);
}

size_t allocated_now(void) { return live; }

size_t allocated_most(void) { return most; }

void allocated_forget(void) { most = live; }
