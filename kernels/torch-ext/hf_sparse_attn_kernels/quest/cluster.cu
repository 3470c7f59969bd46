// Quest's decode step in one launch: a cluster of CLUSTER blocks for each row and KV head appends the token, scores the
// pages, chooses among them, attends and merges. Compiled with _cluster.cuh, _cluster_step.cuh and _cluster_pages.cuh before it and these macros:
// CLUSTER (2 to 16), THREADS (of a block, 256 or 512), BLOCKS (that a multiprocessor has registers for), GROUP (1 to 8),
// REDUCE (0: softmax, 1: mean, 2: max), FIXED_BYTES (set apart for Shared); for benchmarks CLOCKS, see MARK.
//
// The blocks of a cluster score tiles of 16 pages in turn. They meet four times, each time by stores to each other's
// shared memory that count themselves in on a barrier there: for the log-sum-exp of every query head, for the counts of
// the bins of scores, for the chosen pages, and for the partial outputs. Nothing depends on the order of arrival.

struct Arguments {
  const u16 *query, *new_key, *new_value;                          // bf16
  u16 *keys, *values;                                              // bf16
  s8 *page_min, *page_max, *page_exponent, *channel_exponent;      // the exponents are contiguous
  const int *seq_start, *seq_end;
  u64* counter;                                                    // [4], or null
  u16* out;                                                        // bf16 [batch, q_heads, HEAD_DIM]
  float* lse;                                                      // [batch, q_heads]
  int* block_indices;                                              // [batch, kv_heads, max_blocks]
  int* block_counts;                                               // [batch, kv_heads]
  long long query_b, query_h, query_d, new_key_b, new_key_h, new_value_b, new_value_h;  // strides, in elements
  long long keys_b, keys_h, keys_n, values_b, values_h, values_n;
  long long min_b, min_h, min_p, max_b, max_h, max_p;
  int kv_heads, capacity, max_pages, num_pages, max_blocks, sink_blocks, recent_blocks;
  int local_pages;                                                 // most pages of a block, a multiple of 32
  float scale;
};

constexpr int PAGE = 16;
constexpr int BINS = 512;
constexpr int MOST_CANDIDATES = 128, MOST_READ = 512, MOST_EACH = (MOST_READ + CLUSTER - 1) / CLUSTER;
constexpr int NO_PAGE = 0x7FFFFFFF;
static_assert(MOST_CANDIDATES % 8 == 0 && MOST_CANDIDATES <= THREADS && MOST_READ % 16 == 0, "lists are read several at once");

enum Kind { OUT, CANDIDATE, CHOSEN };
enum class Stage { START, QUERY, SCORES, EXCHANGE, KEYS, EDGE, LIST, RANK, ATTEND, MERGE, WRITE };  // STAGES in cluster.py

struct Shared {
  Words4 counts_in[2][CLUSTER][BINS / 8];                 // u16 of each block's bins
  Words4 output_in[CLUSTER][QUADS_EACH];
  alignas(16) u8 query_bytes[2][8 * SETS][HEAD_DIM];      // magnitudes where positive, where negative; high, low by turns
  alignas(16) u16 query[GROUP][HEAD_DIM + 8];
  alignas(16) int chosen[MOST_READ];                      // in the first block: all chosen pages
  u64 candidates[MOST_CANDIDATES];
  u64 barriers[BARRIERS];
  MaxSum warp_lse[1 + WARPS][GROUP], lse_in[CLUSTER][GROUP], warp_output[WARPS][GROUP], sums_in[CLUSTER][GROUP];
  float unit[GROUP], lse[GROUP];
  u32 largest[GROUP * 4];
  alignas(16) u32 histogram[BINS];
  int warp_total[WARPS], above_of[CLUSTER], level_of[CLUSTER];
  int edge, above, level;
  int pages[MOST_EACH];                                   // that this block attends to
};

struct Place {
  int tid, lane, warp, g, t;                              // lane = 4 g + t, as the tensor cores number rows and columns
  int rank, pair, row, head;
  int start, end, length, row_pages, last_page;           // last_page: the new token's
  int tiles;                                              // of this block
};

// ---- scores

// The token, its page's bounds, and the page's scores; one warp, with four channels a lane.
DEVICE void append(Shared& s, const Arguments& a, const Place& at, float* scores, int stride) {
  const int d = at.lane * 4, offset = at.length - 1;
  const bool has_others = offset % PAGE > 0;
  const u16* new_key = a.new_key + at.row * a.new_key_b + at.head * a.new_key_h + d;
  const u16* new_value = a.new_value + at.row * a.new_value_b + at.head * a.new_value_h + d;
  u16* key_out = a.keys + at.row * a.keys_b + at.head * a.keys_h + (at.end - 1) * a.keys_n + d;
  u16* value_out = a.values + at.row * a.values_b + at.head * a.values_h + (at.end - 1) * a.values_n + d;
  s8* page_min = a.page_min + at.row * a.min_b + at.head * a.min_h + at.last_page * a.min_p + d;
  s8* page_max = a.page_max + at.row * a.max_b + at.head * a.max_h + at.last_page * a.max_p + d;
  s8* page_exponent = a.page_exponent + (long long)at.pair * a.max_pages + at.last_page;
  s8* channel_exponent = a.channel_exponent + (long long)at.pair * HEAD_DIM + d;

  u16 key[4], value[4];
  int old_lower[4], old_upper[4], exponent[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    key[i] = new_key[i], value[i] = new_value[i];
    old_lower[i] = page_min[i], old_upper[i] = page_max[i], exponent[i] = channel_exponent[i];
  }
  const int old_exponent = has_others ? *page_exponent : 0;
  float scaled[4], largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    key_out[i] = key[i], value_out[i] = value[i];
    const float magnitude = fabsf(bf16(key[i])), partner = shuffle_xor(magnitude, 16);
    if (offset == 0) {
      exponent[i] = clamp(exponent_for(fmaxf(magnitude, partner), 3407872), -60, 60);   // 90 levels, 127 if rotated
      channel_exponent[i] = (s8)exponent[i];
    }
    scaled[i] = bf16(key[i]) * power_of_two(-exponent[i]);
    largest = fmaxf(largest, fabsf(scaled[i]));
  }
  largest = as_float(warp_max(as_bits(largest)));
  const int new_exponent = max(clamp(exponent_for(largest, 8257536), 0, 60), old_exponent);  // 127 levels
  const float down = power_of_two(-new_exponent), step = power_of_two(old_exponent - new_exponent);
  float lower[4], upper[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    lower[i] = clamp(floorf(scaled[i] * down), -127.f, 127.f);
    upper[i] = clamp(ceilf(scaled[i] * down), -127.f, 127.f);
    if (has_others) {
      lower[i] = fminf(lower[i], clamp(floorf(old_lower[i] * step), -127.f, 127.f));
      upper[i] = fmaxf(upper[i], clamp(ceilf(old_upper[i] * step), -127.f, 127.f));
    }
    page_min[i] = (s8)lower[i], page_max[i] = (s8)upper[i];
  }
  if (at.lane == 0) *page_exponent = (s8)new_exponent;
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float q = bf16(s.query[h][d + i]) * power_of_two(exponent[i]);
      score += fmaxf(q * lower[i], q * upper[i]);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) score += shuffle_xor(score, mask);
    score *= a.scale * LOG2_E * power_of_two(new_exponent);
    if (at.lane == 0) {
      scores[h * stride + (at.last_page / TILE / CLUSTER) * TILE + at.last_page % TILE] = score;
      s.warp_lse[0][h] = MaxSum{score, 1.f};
    }
  }
}

DEVICE void score_pages(Shared& s, const Arguments& a, const Bounds& bounds, Place& at, float* scores, int stride) {
  at.start = a.seq_start[at.row], at.end = a.seq_end[at.row];
  const QueryParts query = load_query(a, at);             // before the tiles, behind which it would have to wait
  Tile tiles[2];                                          // in flight before the row's length is known
  load_tile(tiles[0], bounds, at.warp);
  load_tile(tiles[1], bounds, at.warp + WARPS);
  if (at.tid < GROUP) s.warp_lse[0][at.tid] = MaxSum{LOW, 0.f};
#pragma unroll 1
  for (int i = at.tid; i < BINS; i += THREADS) s.histogram[i] = 0;
#pragma unroll 1
  for (int i = at.tid; i < MOST_READ; i += THREADS) s.chosen[i] = NO_PAGE;
  if (at.tid < MOST_CANDIDATES) s.candidates[at.tid] = 0;
  float scaled[ELEMENTS];
  scale_query(s, at, query, scaled);
  sync_block();
  split_query(s, a, at, scaled);
  sync_block();
  MARK(Stage::QUERY);
  at.length = max(at.end - at.start, 0);
  at.row_pages = min((at.length + PAGE - 1) / PAGE, a.num_pages);
  at.last_page = max(at.row_pages - 1, 0);
  at.tiles = ((at.row_pages + TILE - 1) / TILE - at.rank + CLUSTER - 1) / CLUSTER;
  if (at.warp == WARPS - 1 && at.length > 0 && at.last_page / TILE % CLUSTER == at.rank)
    append(s, a, at, scores, stride);
  score_tiles(s, bounds, tiles, at, scores, stride);
}

// ---- the choice

// Where the choice ends: pages in bins before `edge` are chosen; those in it are candidates, or with `shift` below 48,
// those of them whose ranks begin with `prefix`, and chosen if they begin with more.
struct Edge {
  int bin, shift;
  u64 prefix;
  bool all;                                               // of the candidates are chosen
};

// Key and page in one number: pages with equal scores come in ascending order.
DEVICE u64 rank_of(u32 key, int page) { return (u64)key << 16 | (u32)(0xFFFF - page); }

DEVICE int digit_bin(u64 rank, int shift) { return 255 - (int)(rank >> shift & 255); }

DEVICE Kind kind_of(const Edge& edge, int bin, u64 rank) {
  if (bin != edge.bin) return bin < edge.bin ? CHOSEN : OUT;
  if (edge.shift < 48) {
    const u64 digits = rank >> edge.shift;
    if (digits != edge.prefix) return digits > edge.prefix ? CHOSEN : OUT;
  }
  return edge.all ? CHOSEN : CANDIDATE;
}

struct Choice {
  int count, sure, level;                                 // pages to read; those above the edge; candidates
};

// Choose pages and send them out: number n of the chosen ones to block n % CLUSTER, and all to the first block;
// candidates, if not all are chosen, to every block.
DEVICE Choice choose(Shared& s, const Arguments& a, const Place& at, float* scores, int stride, u32* word_counts) {
  u32* keys = (u32*)scores;                               // each thread's take the place of its scores
  const int local_pages = at.tiles * TILE, rounds = (local_pages + THREADS - 1) / THREADS;
  float lse[GROUP];
  const float top = load_lse(s, lse);
#pragma unroll 1
  for (int i = at.tid; i < CLUSTER; i += THREADS) s.above_of[i] = 0;
#pragma unroll 2
  for (int local = at.tid; local < local_pages; local += THREADS) {
    const int page = page_of(at, local);
    u32 key = 0;
    if (page < at.row_pages) {
      const bool forced = page < a.sink_blocks || page >= at.row_pages - a.recent_blocks;
      key = forced ? FORCED : order_key(reduced(scores, stride, lse, local));
      add_shared(&s.histogram[bin_of<BINS>(key, top)]);
    }
    keys[local] = key;
  }
  MARK(Stage::KEYS);

  const int count = min(at.row_pages, a.max_blocks);
  Edge edge{0, 48, 0, false};
  int need = count, level = 0;
#pragma unroll 1
  for (int round = 0;; round++) {                         // the same in all blocks
    find_edge<BINS>(s, at, s.counts_in[round & 1], &s.barriers[round & 1 ? ODD_COUNTS : EVEN_COUNTS], round >> 1 & 1, need);
    if (round == 0)
      edge.bin = s.edge;
    else
      edge.prefix = edge.prefix << 8 | (u32)(255 - s.edge);
    need -= s.above, level = s.level;
    edge.all = level == need;
    if (edge.all || level <= MOST_CANDIDATES) break;
    sync_block();
#pragma unroll 1
    for (int i = at.tid; i < BINS; i += THREADS) s.histogram[i] = 0;
    sync_block();
#pragma unroll 1
    for (int local = at.tid; local < local_pages; local += THREADS) {
      const int page = page_of(at, local);
      const u64 rank = rank_of(keys[local], page);
      if (page < at.row_pages && kind_of(edge, bin_of<BINS>(keys[local], top), rank) == CANDIDATE)
        add_shared(&s.histogram[digit_bin(rank, edge.shift - 8)]);
    }
    edge.shift -= 8;
  }
  MARK(Stage::EDGE);

  // Chosen pages and candidates of every word of 32 pages, whose sums are the places of each.
#pragma unroll 1
  for (int i = 0; i < rounds; i++) {
    const int local = i * THREADS + at.tid, page = page_of(at, local);
    Kind kind = OUT;
    if (local < local_pages && page < at.row_pages) kind = kind_of(edge, bin_of<BINS>(keys[local], top), rank_of(keys[local], page));
    const u32 counts = count_bits(warp_ballot(kind == CHOSEN)) | count_bits(warp_ballot(kind == CANDIDATE)) << 16;
    if (at.lane == 0) word_counts[i * WARPS + at.warp] = counts;
  }
  sync_block();
  const int sent_level = edge.all ? 0 : level, sure = count - (edge.all ? 0 : need);
  int place = warp_sum(at.lane < at.rank && at.lane < CLUSTER ? s.above_of[at.lane] + (edge.all ? s.level_of[at.lane] : 0) : 0);
  int candidate = warp_sum(at.lane < at.rank && at.lane < CLUSTER ? s.level_of[at.lane] : 0);
  const u32 lanes_below = (1u << at.lane) - 1;
#pragma unroll 1
  for (int i = 0, word = 0; i < rounds; i++) {            // word: up to which the places count
    const int mine = i * WARPS + at.warp;
    int between = 0;
#pragma unroll 1
    for (int j = word + at.lane; j < mine; j += 32) between += (int)word_counts[j];
    between = warp_sum(between);
    place += between & 0xFFFF, candidate += between >> 16, word = mine;
    const int local = i * THREADS + at.tid, page = page_of(at, local);
    Kind kind = OUT;
    if (local < local_pages && page < at.row_pages) kind = kind_of(edge, bin_of<BINS>(keys[local], top), rank_of(keys[local], page));
    const u32 chosen = warp_ballot(kind == CHOSEN), candidates = warp_ballot(kind == CANDIDATE);
    if (kind != OUT) prefetch_page<PAGE>(a, at, page);
    if (kind == CHOSEN) {
      const int n = place + count_bits(chosen & lanes_below);
      send((u32*)&s.pages[n / CLUSTER], n % CLUSTER, (u32)page, &s.barriers[CHOICE]);
      send((u32*)&s.chosen[n], 0, (u32)page, &s.barriers[CHOICE]);
    }
    if (kind == CANDIDATE) {
      const int n = candidate + count_bits(candidates & lanes_below);
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) send(&s.candidates[n], c, rank_of(keys[local], page), &s.barriers[CHOICE]);
    }
  }
  if (at.tid == 0) {
    const int own = at.rank < sure ? (sure - at.rank + CLUSTER - 1) / CLUSTER : 0;
    arm_barrier(&s.barriers[CHOICE], 4 * (own + (at.rank == 0 ? sure : 0)) + 8 * sent_level);
  }
  return Choice{count, sure, sent_level};
}

// Rank the candidates among themselves: in every block, which keeps its own.
DEVICE void choose_candidates(Shared& s, const Place& at, const Choice& choice) {
#pragma unroll 1
  for (int i = at.tid; i < choice.level; i += THREADS) {
    const u64 rank = s.candidates[i];
    int n = choice.sure;
#pragma unroll 1
    for (int j = 0; j < choice.level; j += 8)             // zeros after the last
#pragma unroll
      for (int k = 0; k < 8; k++) n += s.candidates[j + k] > rank;
    const int page = 0xFFFF - (int)(rank & 0xFFFF);
    if (n < choice.count && n % CLUSTER == at.rank) s.pages[n / CLUSTER] = page;
    if (n < choice.count && at.rank == 0) s.chosen[n] = page;
  }
}

// ---- attention

// Attend to this block's pages, a warp a page.
DEVICE void attend(Shared& s, const Arguments& a, const Place& at, const Choice& choice, Output& out) {
  Page page{a.keys + at.row * a.keys_b + at.head * a.keys_h, a.values + at.row * a.values_b + at.head * a.values_h,
            (u32)a.keys_n, (u32)a.values_n, 0, at.end};
  wait_barrier(&s.barriers[CHOICE], 0);
  MARK(Stage::LIST);
  const int own = at.rank < choice.count ? (choice.count - at.rank + CLUSTER - 1) / CLUSTER : 0;
  choose_candidates(s, at, choice);                       // before the loads, behind which shared memory would wait
  sync_block();
  MARK(Stage::RANK);
#pragma unroll 1
  for (int n = at.warp; n < own; n += WARPS) {
    page.first = at.start + s.pages[n] * PAGE;
    Tokens tokens;
    load_tokens(tokens, page, at);
    attend_tokens(out, tokens, s, at, page.end - page.first, a.scale * LOG2_E);
  }
}

// The selection in ascending order, and the counts; the first block, while the outputs are on their way.
DEVICE void write_selection(const Shared& s, const Arguments& a, const Place& at, const Choice& choice) {
  int* indices = a.block_indices + (long long)at.pair * a.max_blocks;
#pragma unroll 1
  for (int i = at.tid; i < a.max_blocks; i += THREADS) {
    if (i >= choice.count) {
      indices[i] = -1;
      continue;
    }
    const int page = s.chosen[i];
    int before = 0;
#pragma unroll 1
    for (int j = 0; j < choice.count; j += 16)            // NO_PAGE after the last
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const Words4 four = *(const Words4*)&s.chosen[j + 4 * k];
        before += ((int)four.x[0] < page) + ((int)four.x[1] < page) + ((int)four.x[2] < page) + ((int)four.x[3] < page);
      }
    indices[before] = page;
  }
  if (at.tid == 0) {
    a.block_counts[at.pair] = choice.count;
    if (a.counter) {
      const int missing = at.row_pages * PAGE - at.length;  // of the newest page, which is always read
      add_global(a.counter, (u64)max(choice.count * PAGE - missing, 0));
      add_global(a.counter + 1, (u64)at.length);
      if (at.row_pages > 0) add_global(a.counter + 2, (u64)at.row_pages * (2 * HEAD_DIM + 1) + HEAD_DIM);
      if (at.pair == 0) add_global(a.counter + 3, 1);
    }
  }
}

KERNEL(quest_step)(const Arguments a) {
  u8* memory = dynamic_shared();
  Shared& s = *(Shared*)memory;
  const int stride = a.local_pages + 8;                   // other banks for each head
  static_assert(sizeof(Shared) <= FIXED_BYTES, "what follows has a place of its own");
  float* scores = (float*)(memory + FIXED_BYTES);
  u32* word_counts = (u32*)(scores + GROUP * stride);
  Words4* quads = (Words4*)scores;                        // after the choice

  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.g = at.lane / 4, at.t = at.lane % 4;
  at.rank = cluster_rank(), at.row = block_y(), at.head = block_x() / CLUSTER, at.pair = at.row * a.kv_heads + at.head;
  if (at.tid == 0) {
    for (int i = 0; i < BARRIERS; i++) init_barrier(&s.barriers[i]);
    publish_barriers();
  }
  sync_warp();
  arrive_cluster();
  const Bounds bounds = bounds_of(a, at);
  wait_for_previous_kernel();
  let_next_kernel_start();
  MARK(Stage::START);
  score_pages(s, a, bounds, at, scores, stride);
  MARK(Stage::SCORES);
  exchange_lse<REDUCE == 0 && (GROUP > 1)>(s, at);
  MARK(Stage::EXCHANGE);
  const Choice choice = choose(s, a, at, scores, stride, word_counts);
  Output out = {MaxSum{LOW, 0.f}, {}};
  attend(s, a, at, choice, out);
  MARK(Stage::ATTEND);
  send_output(s, at, out, quads);
  if (at.rank == 0) write_selection(s, a, at, choice);
  wait_barrier(&s.barriers[OUTPUT], 0);
  MARK(Stage::MERGE);
  write_output(s, a, at);
  MARK(Stage::WRITE);
}
