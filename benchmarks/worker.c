/* The instant worker: a static C program, so that what is measured is the launcher and not the worker.
 *
 * usage: worker EVENTS MODE [COUNT]
 *
 * EVENTS is a FIFO held open by the harness; each event is one line, written whole:
 *     <monotonic ns> <event> <pid> <start time of the process in ticks> <rank> <restart count> <world size>
 *     <generation, 0 where the launcher does not number them> <the agent's number: BENCH_NODE in its environment>
 *
 * MODE
 *   exit         stamp "start" and "end", leave with 0
 *   idle         stamp "start", wait for a signal
 *   steady       the same, and stamp "term" when told to stop
 *   die COUNT    rank 0 stamps "die" and kills itself after a quarter of a second or a little more, the others stamp
 *                "term" when they are told to stop; from the COUNT-th restart on everybody leaves with 0
 *   lines COUNT  write COUNT numbered lines to stdout, stamp "end", leave with 0
 *   brood        three descendants that are hard to end, each with its own stamp; then wait for a signal
 *
 * Nothing lives longer than LIFE_S, even when harness and launcher are gone.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LIFE_S = 300 };

static int events = -1;
static const char *rank, *restarts, *world, *generation, *node;
static unsigned long long started_ticks;

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static const char *variable(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value ? value : otherwise;
}

/* A pid can be given away again; pid and start time together name one process for good. */
static void learn_start_time(void) {
  char text[1024];
  int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  ssize_t length = read(fd, text, sizeof text - 1);
  close(fd);
  text[length > 0 ? length : 0] = 0;
  const char *field = strrchr(text, ')');
  for (int i = 0; field && i < 20; i++) field = strchr(field + 1, ' ');
  started_ticks = field ? strtoull(field + 1, NULL, 10) : 0;
}

static void stamp(long long at_ns, const char *event) {
  char line[256];
  int length = snprintf(line, sizeof line, "%lld %s %d %llu %s %s %s %s %s\n", at_ns, event, getpid(), started_ticks, rank,
                        restarts, world, generation, node);
  if (write(events, line, length) != length) _exit(9);
}

static void wait_for_a_signal(void) {
  for (;;) pause();
}

static void block_term(void) {
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  sigprocmask(SIG_BLOCK, &term, NULL);
}

static void wait_to_be_told(void) {
  sigset_t term;
  int number;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  sigwait(&term, &number);
  stamp(now_ns(), "term");
  _exit(128 + SIGTERM);
}

static void die(int count) {
  if (atoi(restarts) >= count) {
    stamp(now_ns(), "end");
    return;
  }
  if (strcmp(rank, "0") == 0) {
    /* Spread over two of torchrun's monitor intervals, so that no phase of its polling is favoured. */
    srand48(now_ns() ^ getpid());
    usleep(250000 + (useconds_t)(drand48() * 200000));
    stamp(now_ns(), "die");
    kill(getpid(), SIGKILL);
    wait_for_a_signal();
  }
  block_term();
  wait_to_be_told();
}

static void lines(long count) {
  setvbuf(stdout, NULL, _IOFBF, 8192); /* as Python buffers its stdout */
  for (long i = 0; i < count; i++) printf("%s %09ld a training step has a loss, a rate and a few more words to print\n", rank, i);
  if (fflush(stdout)) _exit(8);
  stamp(now_ns(), "end");
}

static void descendant(const char *event) {
  alarm(LIFE_S);
  learn_start_time();
  stamp(now_ns(), event);
}

static void refuse_to_go(void) {
  setsid();
  signal(SIGTERM, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
}

static void brood(void) {
  if (fork() == 0) {
    descendant("child");
    wait_for_a_signal();
  }
  if (fork() == 0) {
    refuse_to_go();
    descendant("escaped");
    wait_for_a_signal();
  }
  pid_t between = fork();
  if (between == 0) {
    refuse_to_go();
    if (fork()) _exit(0);
    descendant("daemon");
    for (int fd = 0; fd < 1024; fd++) close(fd);
    wait_for_a_signal();
  }
  waitpid(between, NULL, 0);
  wait_for_a_signal();
}

int main(int argc, char **argv) {
  long long at_ns = now_ns();
  if (argc < 3) return 2;
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  signal(SIGALRM, SIG_DFL);
  alarm(LIFE_S);
  rank = variable("RANK", "0");
  restarts = variable("TORCHELASTIC_RESTART_COUNT", "0");
  world = variable("WORLD_SIZE", "1");
  generation = variable("TENAX_GENERATION", "0");
  node = variable("BENCH_NODE", "0");
  events = open(argv[1], O_WRONLY | O_NONBLOCK | O_CLOEXEC);
  if (events < 0) return 3;
  const char *mode = argv[2];
  if (strcmp(mode, "steady") == 0) block_term(); /* before the stamp: who sees it may tell us to stop at once */
  learn_start_time();
  stamp(at_ns, "start");

  long count = argc > 3 ? atol(argv[3]) : 0;
  if (strcmp(mode, "exit") == 0) stamp(now_ns(), "end");
  else if (strcmp(mode, "idle") == 0) wait_for_a_signal();
  else if (strcmp(mode, "steady") == 0) wait_to_be_told();
  else if (strcmp(mode, "die") == 0) die((int)count);
  else if (strcmp(mode, "lines") == 0) lines(count);
  else if (strcmp(mode, "brood") == 0) brood();
  else return 2;
  return 0;
}
