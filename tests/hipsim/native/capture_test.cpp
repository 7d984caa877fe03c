// SPDX-License-Identifier: Apache-2.0
#include "engine/capture.h"

#include <algorithm>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "test.h"

namespace hipsim {
namespace {

using test::for_seeds;

const std::thread::id kSelf = std::this_thread::get_id();

// Another thread's name; the thread is gone.
std::thread::id other_thread() {
  std::thread::id id;
  std::thread([&] { id = std::this_thread::get_id(); }).join();
  return id;
}

constexpr CaptureMode kModes[] = {CaptureMode::kGlobal, CaptureMode::kThreadLocal,
                                  CaptureMode::kRelaxed};

void begin(Captures& captures, Handle stream, CaptureMode mode = CaptureMode::kGlobal) {
  CHECK_OK(captures.begin(stream, true, mode, kSelf));
}

Error end(Captures& captures, Handle stream, Graph* graph = nullptr) {
  Graph unwanted;
  return captures.end(stream, kSelf, false, graph == nullptr ? &unwanted : graph);
}

// Makes `stream` depend on all that `on` has captured.
Error join(Captures& captures, Handle stream, Handle on) {
  return captures.join(stream, true, captures.point(on));
}

// --- beginning and ending ----------------------------------------------------------

TEST(a_capture_yields_its_nodes_in_order) {
  Captures captures;
  CHECK(captures.status(1) == CaptureStatus::kNone && captures.id(1) == 0);
  begin(captures, 1);
  CHECK(captures.status(1) == CaptureStatus::kActive && captures.id(1) != 0);
  CHECK(captures.any_active() && captures.live() == 1);
  for (int i = 0; i < 3; ++i) captures.add(1, {});
  Graph graph;
  CHECK_OK(end(captures, 1, &graph));
  CHECK_EQ(graph.nodes.size(), 3);
  CHECK(graph.nodes[0].after.empty());
  CHECK(graph.nodes[2].after == std::set<size_t>{1});
  CHECK(captures.status(1) == CaptureStatus::kNone && !captures.any_active());
  CHECK_EQ(captures.live(), 0);
}

TEST(an_empty_capture_is_a_graph_too) {
  Captures captures;
  begin(captures, 1);
  Graph graph;
  CHECK_OK(end(captures, 1, &graph));
  CHECK(graph.nodes.empty());
}

TEST(captures_have_names_of_their_own) {
  Captures captures;
  begin(captures, 1);
  begin(captures, 2);
  const uint64_t first = captures.id(1);
  CHECK(first != captures.id(2));
  CHECK_OK(end(captures, 1));
  begin(captures, 1);
  CHECK(captures.id(1) != first && captures.id(1) != captures.id(2));
}

TEST(a_stream_captures_once_at_a_time) {
  Captures captures;
  begin(captures, 1);
  CHECK_ERROR(captures.begin(1, true, CaptureMode::kRelaxed, kSelf), kIllegalState);
  CHECK_OK(join(captures, 2, 1));
  CHECK_ERROR(captures.begin(2, true, CaptureMode::kGlobal, kSelf), kIllegalState);
  CHECK_OK(end(captures, 1));
}

TEST(a_capture_ends_at_its_origin_and_with_its_thread) {
  Captures captures;
  CHECK_ERROR(end(captures, 1), kIllegalState);
  begin(captures, 1);
  CHECK_OK(join(captures, 2, 1));
  CHECK_ERROR(end(captures, 2), kCaptureUnmatched);
  CHECK_ERROR(end(captures, 3), kIllegalState);
  CHECK_OK(end(captures, 1));
  CHECK_ERROR(end(captures, 1), kIllegalState);

  const std::thread::id other = other_thread();
  for (const CaptureMode mode : kModes) {
    CHECK_OK(captures.begin(1, true, mode, other));
    if (mode != CaptureMode::kRelaxed) {
      CHECK_ERROR(end(captures, 1), kCaptureWrongThread);
      CHECK(captures.status(1) == CaptureStatus::kActive);
      Graph graph;
      CHECK_OK(captures.end(1, other, false, &graph));
    } else {
      CHECK_OK(end(captures, 1));
    }
  }
}

// --- forks -------------------------------------------------------------------------

TEST(a_fork_is_joined_before_the_end) {
  Captures captures;
  begin(captures, 1);
  captures.add(1, {});
  CHECK_OK(join(captures, 2, 1));
  CHECK(captures.status(2) == CaptureStatus::kActive);
  CHECK(captures.id(2) == captures.id(1));
  captures.add(2, {});
  captures.add(1, {});
  CHECK_OK(join(captures, 1, 2));
  captures.add(1, {});
  Graph graph;
  CHECK_OK(end(captures, 1, &graph));
  CHECK_EQ(graph.nodes.size(), 4);
  CHECK(graph.nodes[1].after == std::set<size_t>{0});
  CHECK(graph.nodes[2].after == std::set<size_t>{0});
  CHECK((graph.nodes[3].after == std::set<size_t>{1, 2}));
  CHECK(captures.status(2) == CaptureStatus::kNone);
}

TEST(a_join_without_a_node_behind_it_counts) {
  Captures captures;
  begin(captures, 1);
  CHECK_OK(join(captures, 2, 1));
  captures.add(2, {});
  CHECK_OK(join(captures, 1, 2));
  CHECK_OK(end(captures, 1));
}

TEST(a_fork_left_alone_spoils_the_end) {
  Captures captures;
  begin(captures, 1);
  CHECK_OK(join(captures, 2, 1));
  captures.add(2, {});
  captures.add(1, {});
  CHECK_ERROR(end(captures, 1), kCaptureUnjoined);
  CHECK_EQ(captures.live(), 0);
  begin(captures, 1);
  begin(captures, 2);
}

TEST(work_after_the_join_spoils_the_end) {
  Captures captures;
  begin(captures, 1);
  CHECK_OK(join(captures, 2, 1));
  captures.add(2, {});
  CHECK_OK(join(captures, 1, 2));
  captures.add(2, {});
  CHECK_ERROR(end(captures, 1), kCaptureUnjoined);
}

TEST(a_fork_without_a_node_needs_no_join) {
  Captures captures;
  begin(captures, 1);
  captures.add(1, {});
  CHECK_OK(join(captures, 2, 1));
  CHECK_OK(end(captures, 1));
}

TEST(a_point_stands_for_what_was_captured_before_it) {
  Captures captures;
  begin(captures, 1);
  captures.add(1, {});
  const CapturedPoint early = captures.point(1);
  captures.add(1, {});
  CHECK_OK(captures.join(2, true, early));
  captures.add(2, {});
  CHECK_OK(join(captures, 1, 2));
  captures.add(1, {});
  Graph graph;
  CHECK_OK(end(captures, 1, &graph));
  CHECK(graph.nodes[2].after == std::set<size_t>{0});
  CHECK((graph.nodes[3].after == std::set<size_t>{1, 2}));
}

TEST(two_captures_do_not_merge) {
  Captures captures;
  begin(captures, 1);
  begin(captures, 2);
  begin(captures, 3);
  CHECK_ERROR(join(captures, 2, 1), kCaptureMerge);
  CHECK(captures.status(1) == CaptureStatus::kInvalidated);
  CHECK(captures.status(2) == CaptureStatus::kInvalidated);
  CHECK(captures.status(3) == CaptureStatus::kActive);
  CHECK_ERROR(end(captures, 1), kCaptureInvalidated);
  CHECK_ERROR(end(captures, 2), kCaptureInvalidated);
  CHECK_OK(end(captures, 3));
}

TEST(nobody_joins_what_is_invalid_or_over) {
  Captures captures;
  begin(captures, 1);
  const CapturedPoint point = captures.point(1);
  captures.invalidate(point.capture);
  CHECK_ERROR(captures.join(2, true, point), kCaptureInvalidated);
  CHECK_ERROR(end(captures, 1), kCaptureInvalidated);
  CHECK_ERROR(captures.join(2, true, point), kCaptureInvalidated);
  CHECK(captures.status(2) == CaptureStatus::kNone);
}

// --- invalidation ------------------------------------------------------------------

TEST(an_invalid_capture_ends_without_a_graph) {
  for (const bool stays_invalid : {false, true}) {
    Captures captures;
    begin(captures, 1);
    captures.add(1, {});
    CHECK_OK(join(captures, 2, 1));
    captures.invalidate_all();
    CHECK(!captures.any_active() && captures.live() == 1);
    CHECK(captures.status(1) == CaptureStatus::kInvalidated);
    CHECK(captures.status(2) == CaptureStatus::kInvalidated);
    Graph graph;
    CHECK_ERROR(captures.end(1, kSelf, stays_invalid, &graph), kCaptureInvalidated);
    CHECK(graph.nodes.empty() && captures.live() == 0);
    const CaptureStatus after =
        stays_invalid ? CaptureStatus::kInvalidated : CaptureStatus::kNone;
    CHECK(captures.status(1) == after && captures.status(2) == after);
    CHECK(captures.id(1) == 0);
    if (stays_invalid) {
      CHECK_ERROR(end(captures, 1), kCaptureInvalidated);
    } else {
      CHECK_ERROR(end(captures, 1), kIllegalState);
    }
    captures.forget(1);
    CHECK(captures.status(1) == CaptureStatus::kNone && captures.status(2) == after);
    begin(captures, 2);
    CHECK_OK(end(captures, 2));
    CHECK(captures.status(2) == CaptureStatus::kNone);
  }
}

TEST(an_unsafe_call_spoils_what_mode_and_thread_say) {
  const std::thread::id other = other_thread();
  for (const CaptureMode asking : kModes) {
    for (const CaptureMode mode : kModes) {
      for (const bool own : {true, false}) {
        Captures captures;
        CHECK_OK(captures.begin(1, true, mode, own ? kSelf : other));
        const bool harmless =
            asking == CaptureMode::kRelaxed || mode == CaptureMode::kRelaxed ||
            (!own && (asking != CaptureMode::kGlobal || mode != CaptureMode::kGlobal));
        const Error error = captures.forbid_unsafe_call(asking, kSelf);
        CHECK((error == Error::kSuccess) == harmless);
        CHECK((captures.status(1) == CaptureStatus::kActive) == harmless);
        if (harmless) continue;
        CHECK(error == Error::kCaptureUnsupported);
        // What is spoilt already forbids nothing.
        CHECK_OK(captures.forbid_unsafe_call(asking, kSelf));
      }
    }
  }
}

TEST(an_unsafe_call_spoils_no_other_capture) {
  Captures captures;
  begin(captures, 1, CaptureMode::kThreadLocal);
  begin(captures, 2, CaptureMode::kRelaxed);
  CHECK_OK(captures.begin(3, true, CaptureMode::kThreadLocal, other_thread()));
  CHECK_ERROR(captures.forbid_unsafe_call(CaptureMode::kThreadLocal, kSelf),
              kCaptureUnsupported);
  CHECK(captures.status(1) == CaptureStatus::kInvalidated);
  CHECK(captures.status(2) == CaptureStatus::kActive);
  CHECK(captures.status(3) == CaptureStatus::kActive);
}

TEST(one_capture_is_spoilt_by_name) {
  Captures captures;
  begin(captures, 1);
  begin(captures, 2);
  captures.invalidate(captures.id(1));
  captures.invalidate(12345);
  CHECK(captures.status(1) == CaptureStatus::kInvalidated);
  CHECK(captures.status(2) == CaptureStatus::kActive);
  CHECK(!captures.is_active(captures.id(1)) && captures.is_active(captures.id(2)));
  CHECK(!captures.is_active(0));
}

TEST(reset_spoils_captures_and_frees_streams) {
  Captures captures;
  begin(captures, 1);
  captures.invalidate_all();
  Graph graph;
  CHECK_ERROR(captures.end(1, kSelf, true, &graph), kCaptureInvalidated);
  begin(captures, 2);
  CHECK(captures.status(1) == CaptureStatus::kInvalidated);
  captures.reset();
  CHECK(captures.status(1) == CaptureStatus::kNone);
  CHECK(captures.status(2) == CaptureStatus::kInvalidated);
}

TEST(captures_are_chosen_by_a_stream_of_theirs) {
  Captures captures;
  begin(captures, 1);
  begin(captures, 2);
  CHECK_OK(join(captures, 3, 1));
  const auto is = [](Handle wanted) {
    return
        [wanted](Handle stream, bool blocking) { return blocking && stream == wanted; };
  };
  CHECK(captures.any_of_those(is(3)) && !captures.any_of_those(is(4)));
  CHECK(!captures.invalidate_those(is(4)));
  CHECK(captures.invalidate_those(is(3)));
  CHECK(captures.status(1) == CaptureStatus::kInvalidated);
  CHECK(captures.status(2) == CaptureStatus::kActive);
  CHECK(captures.invalidate_those(is(1)));  // it was invalid already
}

TEST(blocking_streams_are_known) {
  Captures captures;
  CHECK_OK(captures.begin(1, false, CaptureMode::kGlobal, kSelf));
  CHECK(captures.any_active() && !captures.any_blocking());
  CHECK_OK(captures.join(2, true, captures.point(1)));
  CHECK(captures.any_blocking());
  captures.invalidate_all();
  CHECK(!captures.any_blocking());
}

TEST(a_stream_that_goes_takes_its_capture_along) {
  Captures captures;
  begin(captures, 1);
  CHECK_OK(join(captures, 2, 1));
  CHECK_OK(join(captures, 3, 1));
  captures.forget(2);
  CHECK(captures.status(2) == CaptureStatus::kNone);
  CHECK(captures.status(3) == CaptureStatus::kActive);
  const CapturedPoint point = captures.point(1);
  captures.forget(1);
  CHECK(captures.status(3) == CaptureStatus::kNone && captures.live() == 0);
  CHECK_ERROR(captures.join(3, true, point), kCaptureInvalidated);
}

TEST(work_of_a_stream_that_went_is_unjoined) {
  Captures captures;
  begin(captures, 1);
  CHECK_OK(join(captures, 2, 1));
  captures.add(2, {});
  captures.forget(2);
  CHECK_ERROR(end(captures, 1), kCaptureUnjoined);
}

// --- all of it ---------------------------------------------------------------------

// The model has, for each stream, the set of all nodes that its next node will come
// after, direct or not.
TEST(captures_follow_a_reachability_model) {
  constexpr size_t kStreams = 4;
  for_seeds(300, [](std::mt19937& random) {
    Captures captures;
    begin(captures, 1);
    std::vector<std::set<size_t>> before(kStreams + 1);
    std::vector<bool> member(kStreams + 1, false);
    member[1] = true;
    std::vector<std::set<size_t>> nodes;
    struct Recorded {
      CapturedPoint point;
      std::set<size_t> before;
    };
    std::vector<Recorded> events;
    for (int step = 0; step < 14; ++step) {
      const Handle stream = 1 + random() % kStreams;
      const size_t choice = random() % 3;
      if (choice == 0 && member[stream]) {
        captures.add(stream, {});
        nodes.push_back(before[stream]);
        before[stream].insert(nodes.size() - 1);
      } else if (choice == 1 && member[stream]) {
        events.push_back({captures.point(stream), before[stream]});
      } else if (choice == 2 && !events.empty()) {
        const Recorded& event = events[random() % events.size()];
        CHECK_OK(captures.join(stream, true, event.point));
        member[stream] = true;
        before[stream].insert(event.before.begin(), event.before.end());
      }
    }
    for (Handle stream = 1; stream <= kStreams; ++stream) {
      CHECK((captures.status(stream) == CaptureStatus::kActive) == member[stream]);
    }
    Graph graph;
    const Error error = end(captures, 1, &graph);
    const bool joined = before[1].size() == nodes.size();
    CHECK(error == (joined ? Error::kSuccess : Error::kCaptureUnjoined));
    if (!joined) return;
    CHECK_EQ(graph.nodes.size(), nodes.size());
    for (size_t i = 0; i < nodes.size(); ++i) {
      std::set<size_t> reached;
      for (const size_t direct : graph.nodes[i].after) {
        CHECK(direct < i);
        reached.insert(direct);
        reached.insert(nodes[direct].begin(), nodes[direct].end());
      }
      CHECK(reached == nodes[i]);
    }
  });
}

}  // namespace
}  // namespace hipsim
