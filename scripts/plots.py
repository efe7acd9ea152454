"""The plots of the scripts' results; each says on its face what was measured, where and how."""

import textwrap

_COLOURS = {"tf_data": "#e8833a", "dali_cpu": "#4c8c2b", "dali_gpu": "#76b900"}


def plot_throughput(report: dict, *, work: str, path: str) -> None:
    """Plots images/s of each row: bars for the medians, lines from the slowest to the fastest window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["rows"]
    figure, axes = plt.subplots(figsize=(11, 2.6 + 0.6 * len(rows)), layout="constrained")
    fastest = max(row["images_per_second"]["maximum"] for row in rows.values())
    for position, (backend, row) in enumerate(rows.items()):
        speed = row["images_per_second"]
        spread = [[speed["median"] - speed["minimum"]], [speed["maximum"] - speed["median"]]]
        colour = next((colour for name, colour in _COLOURS.items() if backend.startswith(name)), "grey")
        pale = backend.endswith(("_bare", "_by_hand", "_serial"))
        axes.barh(position, speed["median"], color=colour, alpha=0.45 if pale else 1.0)
        axes.errorbar(speed["median"], position, xerr=spread, color="black", capsize=4, linewidth=1)
        ratio = row["ratio_to_tf_data"]
        times = f"  ({ratio['median']:.2f} x tf_data)" if ratio and backend != "tf_data" else ""
        axes.text(speed["maximum"] + 0.012 * fastest, position, f"{speed['median']:,.0f}{times}", va="center")
    axes.set_yticks(range(len(rows)), [f"{row['what']}\n{backend}" for backend, row in rows.items()])
    axes.invert_yaxis()
    axes.set_xlim(0, fastest * 1.25)
    axes.set_xlabel("images per second (higher is better)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.suptitle("Feeding TensorFlow from TFRecords of JPEGs", fontsize=14, fontweight="bold")
    dataset, versions = report["dataset"], report["versions"]
    axes.set_title(f"each image: {work}; batch {report['batch_size']}", fontsize=9)
    gpus = f", {', '.join(report['gpus'])}" if report["gpus"] else ", no GPU"
    note = (
        f"Bars: median of {report['repeats']} windows of {report['seconds']:g} s, measured in turn; lines: slowest to fastest. "
        f"Data: {dataset['num_records']:,} JPEGs, {dataset['bytes'] / dataset['num_records'] / 1e3:,.0f} KB each. "
        f"Machine: {report['cpu']}, {report['cores']} cores{gpus}. "
        f"TensorFlow {versions['TensorFlow']}, DALI {versions['DALI']}, {report['date'][:10]}."
    )
    figure.supxlabel("\n".join(textwrap.wrap(note, 130)), fontsize=8, color="#444444")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_stages(report: dict, *, names: dict[str, str], path: str) -> None:
    """Plots what each stage costs: a stacked bar for each backend, in time and in CPU time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stages = report["stages"]
    panels = {
        "seconds_per_1000_images": "seconds per 1000 images",
        "cpu_seconds_per_1000_images": "CPU seconds per 1000 images, all threads",
    }
    figure, all_axes = plt.subplots(1, 2, figsize=(13, 3.2 + 0.8 * len(stages)), layout="constrained", sharey=True)
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    for axes, (measure, title) in zip(all_axes, panels.items(), strict=True):
        widest = max(sum(max(0.0, row[measure]["median"]) for row in rows.values()) for rows in stages.values())
        for position, rows in enumerate(stages.values()):
            left = 0.0
            for stage, row in rows.items():
                width = max(0.0, row[measure]["median"])
                axes.barh(position, width, left=left, color=colours[stage], label=names[stage], height=0.6)
                if width > 0.06 * widest:
                    axes.text(left + width / 2, position, f"{width:.2f}", ha="center", va="center", color="white", fontsize=9)
                left += width
            if measure == "seconds_per_1000_images":
                whole = list(rows.values())[-1]["images_per_second"]["median"]
                axes.text(left + 0.01 * widest, position, f"{whole:,.0f} images/s", va="center", fontsize=10)
        axes.set_xlim(0, 1.25 * widest if measure == "seconds_per_1000_images" else 1.05 * widest)
        axes.set_title(f"{title} (less is better)", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    all_axes[0].set_yticks(range(len(stages)), list(stages), fontsize=11)
    all_axes[0].invert_yaxis()
    found = dict(zip(*reversed(all_axes[0].get_legend_handles_labels()), strict=True))
    in_turn = [name for name in names.values() if name in found]
    figure.legend([found[name] for name in in_turn], in_turn, loc="outside right upper", frameon=False)
    figure.suptitle("What each stage of the input costs", fontsize=14, fontweight="bold")
    versions = report["versions"]
    gpus = f", {', '.join(report['gpus'])}" if report["gpus"] else ", no GPU"
    note = (
        f"Medians of {report['repeats']} windows of {report['seconds']:g} s of the pipeline cut after each stage. "
        f"{report['num_records']:,} records, order {report['order']}, batch {report['batch_size']}. "
        f"Machine: {report['cpu']}, {report['cores']} cores{gpus}. "
        f"TensorFlow {versions['TensorFlow']}, DALI {versions['DALI']}, {report['date'][:10]}."
    )
    figure.supxlabel("\n".join(textwrap.wrap(note, 150)), fontsize=8, color="#444444")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_soak(report: dict, parts: dict[str, str], *, path: str) -> None:
    """Plots the memory of each part's processes over its work; what is grey is warm-up and was not judged."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(parts), figsize=(4 * len(parts), 4.4), layout="constrained", sharey=True)
    most = max(sample[1] for rows in report["samples"].values() for samples in rows.values() for sample in samples) / 1e6
    for axes, (part, title) in zip(all_axes, parts.items(), strict=True):
        for name, samples in report["samples"][part].items():
            done, memory = [sample[0] for sample in samples], [sample[1] / 1e6 for sample in samples]
            axes.plot(done, memory, color=_COLOURS.get(name, "grey"), linewidth=1.6, label=name)
        axes.axvspan(0, 0.2 * max(done), color="#dddddd", alpha=0.6, linewidth=0)
        axes.set_xlim(0, max(done))
        axes.set_ylim(0, 1.1 * most)
        axes.set_xlabel(title)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    all_axes[0].set_ylabel("memory of the process, MB")
    all_axes[0].xaxis.set_major_locator(plt.MaxNLocator(4))
    all_axes[0].legend(frameon=False, loc="lower right")
    figure.suptitle("Memory over a long run", fontsize=14, fontweight="bold")
    versions = report["versions"]
    note = (
        f"Each line a process of its own, the host's memory, with TensorFlow's own; grey: warm-up. Images in order "
        f"{report['order']}. Evaluations and datasets: what is held (one arena, trimmed); images and resident: "
        "with the allocator as it is.\n"
        f"{report['cpu']}, {report['cores']} cores; TensorFlow {versions['TensorFlow']}, DALI {versions['DALI']}, "
        f"{report['date'][:10]}."
    )
    figure.supxlabel(note, fontsize=8, color="#444444")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_orders(orders: dict, *, path: str) -> None:
    """Plots where each stored record is served, for each order: a line is no mixing, an even cloud is perfect mixing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(orders), figsize=(4 * len(orders), 4.6), layout="constrained", sharey=True)
    for panel, (name, order) in zip(axes, orders.items(), strict=True):
        panel.scatter(range(len(order)), order, s=1, c=order // 1000 % 20, cmap="tab20", linewidths=0, rasterized=True)
        classes = len(set((order[:256] // 1000).tolist()))
        panel.set_title(f"{name}\n{classes} of 20 classes in the first batch", fontsize=11)
        panel.set_xlabel("place in the epoch")
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("place in the files (a colour a class)")
    figure.suptitle("20,000 records stored class by class: when each is served", fontsize=14, fontweight="bold")
    figure.savefig(path, dpi=75)
    plt.close(figure)
